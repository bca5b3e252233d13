"""TokenAndPositionEmbedding: what it adds up, and what it masks."""

import keras
import numpy as np
import pytest

from keras_performer.layers import PerformerAttention
from keras_performer.layers import TokenAndPositionEmbedding
from keras_performer.layers.embeddings import rotary_embedding
from tests.layers.dense_oracle import VARIANTS
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy
from tools import compile_for_tpu

if ON_TENSORFLOW:
    import tensorflow as tf

IDS = np.random.default_rng(0).integers(1, 19, (2, 7)).astype("int32")


@pytest.mark.parametrize("position", ["learned", "sine", None])
def test_the_embedding_is_a_sum_of_token_and_position(position):
    layer = TokenAndPositionEmbedding(19, 7, 12, position=position)
    constant = to_numpy(layer(np.full((1, 7), 3, "int32")))
    other = to_numpy(layer(np.full((1, 7), 5, "int32")))
    # The same position part for every token ...
    difference = constant - other
    assert_close(difference, np.repeat(difference[:, :1], 7, 1), 1e-5)
    positions = constant - constant[:, :1]
    if position is None:
        np.testing.assert_array_equal(positions, np.zeros((1, 7, 12)))
    else:
        # ... and another one for every position.
        assert len(np.unique(positions[0].round(6), axis=0)) == 7


def test_sine_positions_are_bounded_and_need_no_weight():
    layer = TokenAndPositionEmbedding(19, 7, 12, position="sine")
    layer.build((2, 7))
    assert len(layer.weights) == 1
    layer.set_weights([np.zeros((19, 12))])
    positions = to_numpy(layer(np.zeros((1, 7), "int32")))[0]
    # Sines and cosines of each angle: every row has the norm sqrt(d / 2).
    np.testing.assert_allclose((positions**2).sum(-1), 6.0, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 7])
def test_a_shorter_sequence_gets_the_first_positions(length):
    layer = TokenAndPositionEmbedding(19, 7, 11)
    full = to_numpy(layer(IDS))
    np.testing.assert_array_equal(
        to_numpy(layer(IDS[:, :length])), full[:, :length]
    )


def test_a_sequence_longer_than_the_table_is_refused():
    layer = TokenAndPositionEmbedding(19, 7, 11)
    with pytest.raises(ValueError, match=r"(?s)(8.*7|7.*8)"):
        layer(np.zeros((2, 8), "int32"))


@pytest.mark.tensorflow_only("JAX knows every length when it traces")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_unknown_length_beyond_the_table_is_not_a_number(jit_compile):
    layer = TokenAndPositionEmbedding(19, 7, 11)
    layer.build((None, None))
    function = tf.function(
        layer,
        jit_compile=jit_compile,
        input_signature=[tf.TensorSpec((None, None), "int32")],
    )
    ids = np.ones((2, 9), "int32")
    output = to_numpy(function(ids))
    assert_close(output[:, :7], layer(ids[:, :7]), 1e-6)
    assert np.all(np.isnan(output[:, 7:]))


def test_positions_of_a_grid_are_sums_over_its_axes():
    # Three rows of two columns of five channels, the channel moves first.
    layer = TokenAndPositionEmbedding(19, 30, 11, grid=(3, 2, 5))
    tokens = np.full((1, 30), 4, "int32")
    output = to_numpy(layer(tokens))[0]
    rows, columns, channels = map(to_numpy, layer.position_embeddings)
    token = to_numpy(layer.token_embedding.embeddings)[4]
    expected = [
        token + rows[r] + columns[c] + channels[k]
        for r in range(3)
        for c in range(2)
        for k in range(5)
    ]
    assert_close(output, expected, 1e-6)
    # Given positions find the same vectors, and those beyond are NaN.
    some = np.array([[29, 30, 7]])
    found = to_numpy(layer(tokens[:, :3], positions=some))[0]
    assert_close(found[[0, 2]], [expected[29], expected[7]], 1e-6)
    assert np.all(np.isnan(found[1]))


@pytest.mark.parametrize(
    "grid, position",
    [
        ((3, 2), "learned"),
        ((30.0, 1), "learned"),
        ((-5, -6), "learned"),
        ((), "learned"),
        (30, "learned"),
        ((5, 6), "sine"),
        ((5, 6), None),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(grid, position):
    with pytest.raises(ValueError, match="`grid`.*sequence_length=30"):
        TokenAndPositionEmbedding(19, 30, 12, position=position, grid=grid)


def test_logits_have_a_dtype_of_their_own():
    x = normal(1, 3, 11)
    precise = TokenAndPositionEmbedding(
        19, 7, 11, reverse_dtype="float32", dtype="mixed_bfloat16"
    )
    rounded = TokenAndPositionEmbedding(19, 7, 11, dtype="mixed_bfloat16")
    rounded.build((None, None))
    precise.build((None, None))
    rounded.set_weights(precise.get_weights())
    table = to_numpy(precise.token_embedding.embeddings)
    errors = []
    for layer, dtype in ((precise, "float32"), (rounded, "bfloat16")):
        logits = layer(x, reverse=True)
        assert keras.backend.standardize_dtype(logits.dtype) == dtype
        symbolic = layer(keras.Input((3, 11)), reverse=True)
        assert symbolic.dtype == dtype
        errors.append(np.max(np.abs(to_numpy(logits) - x @ table.T)))
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("position", ["learned", "sine"])
def test_positions_are_those_that_are_given(position):
    layer = TokenAndPositionEmbedding(19, 7, 10, position=position)
    ids = np.array([[3, 1, 4, 1, 5, 9, 2]] * 2)
    full = to_numpy(layer(ids))
    places = np.array([[2, 0], [6, 6]])
    some = layer(np.take_along_axis(ids, places, axis=1), positions=places)
    some = to_numpy(some)
    assert_close(some[0], full[0, [2, 0]], 1e-6)
    assert_close(some[1], full[1, [6, 6]], 1e-6)


@pytest.mark.parametrize("position", [5, 1023, 1024, 70_000, 1_000_000])
def test_angles_of_far_positions_are_still_right(position):
    x = normal(1, 1, 2, 16)
    rotated = to_numpy(rotary_embedding(x, np.array([[position]], "int32")))
    angle = position * 10_000.0 ** -(np.arange(8) / 8)
    a, b = x[..., :8], x[..., 8:]
    cos, sin = np.cos(angle), np.sin(angle)
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    # Rounding of angles: of those below 1024, and of thousands of turns.
    tolerance = (1024 + 2 * np.pi * position / 1024) * 2**-24 * 3
    np.testing.assert_allclose(rotated, expected, atol=tolerance)


def test_mask_zero_marks_the_zeros():
    ids = np.array([[3, 1, 0, 0], [2, 0, 5, 0]], "int32")
    layer = TokenAndPositionEmbedding(19, 7, 11, mask_zero=True)
    np.testing.assert_array_equal(to_numpy(layer.compute_mask(ids)), ids != 0)
    layer = TokenAndPositionEmbedding(19, 7, 11)
    assert layer.compute_mask(ids) is None


def test_the_mask_of_the_embedding_reaches_the_block():
    embedding = TokenAndPositionEmbedding(19, 7, 11, mask_zero=True)
    block = VARIANTS["favor"].block()
    ids = np.array([[3, 1, 4, 0, 0], [2, 7, 1, 8, 0]], "int32")
    x = keras.ops.copy(embedding(ids))
    output = block(embedding(ids))
    assert_close(output, block(x, mask=ids != 0), 1e-6)
    assert_differs(output, block(x))


@pytest.mark.tensorflow_only("what TensorFlow hands to XLA")
def test_no_table_of_positions_is_part_of_a_program():
    def size(length):
        layer = PerformerAttention(2, 16, rotary=True, causal=True)

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x, x) ** 2)
            return tape.gradient(loss, x)

        x = tf.zeros((1, length, 32))
        layer.build(x.shape, x.shape)
        return len(compile_for_tpu.lower(gradient, x))

    # A table of 512 more positions, 8 wide, has 32 kB in hexadecimals, of
    # the 250 kB of the program.
    assert size(1024) - size(512) < 10_000
