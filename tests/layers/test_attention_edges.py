"""Edges of the layers that a user meets: empty, odd, repeated, too large."""

import keras
import numpy as np
import pytest

from keras_performer import PerformerAttention
from keras_performer import PerformerBlock
from keras_performer import ops
from keras_performer.feature_maps import GeneralizedKernel
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy

X = normal(2, 7, 10, seed=1)


@pytest.mark.parametrize("name", ["favor+", "relu", "exact"])
def test_nothing_to_attend_to_gives_the_bias(name):
    layer = PerformerAttention(2, 4, feature_map=name, num_features=6)
    assert tuple(layer(X[:, :0]).shape) == (2, 0, 10)
    output = layer(X, X[:, :0])
    assert tuple(output.shape) == (2, 7, 10)
    np.testing.assert_array_equal(to_numpy(output), 0.0)


def test_exact_attention_takes_values_of_another_width():
    for width in (3, 11):
        layer = PerformerAttention(2, 4, width, feature_map="exact")
        output = layer(X, X)
        # Rounding alone; all are the same sums.
        from_scores, _ = layer(X, X, return_attention_scores=True)
        assert_close(output, from_scores, 1e-5)
        if not ON_TENSORFLOW:
            continue  # the stock layer fails on JAX for such widths
        mha = keras.layers.MultiHeadAttention(2, 4, width)
        mha.build(X.shape, X.shape)
        mha.set_weights(layer.get_weights())
        assert_close(output, mha(X, X), 1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_the_exponential_kernel_bears_large_inputs(causal):
    layer = PerformerAttention(
        2, 64, feature_map="exp", num_features=32, causal=causal
    )
    output = to_numpy(layer(X * 100))
    assert np.all(np.isfinite(output))
    _, scores = layer(X * 100, return_attention_scores=True)
    np.testing.assert_allclose(
        np.sum(to_numpy(scores), axis=-1), 1.0, rtol=1e-4
    )
    small = PerformerAttention(2, 4, feature_map="exp", num_features=6)
    plain = PerformerAttention(
        2, 4, feature_map=GeneralizedKernel(keras.ops.exp), num_features=6
    )
    small.build(X.shape)
    plain.build(X.shape)
    plain.set_weights(small.get_weights())
    assert_close(small(X), plain(X), 1e-5)  # rounding


@pytest.mark.parametrize("layer_class", [PerformerAttention, PerformerBlock])
def test_a_generator_seeds_dropout_and_projection(layer_class):
    def build():
        return layer_class(
            2, 4, seed=keras.random.SeedGenerator(5), dropout=0.5
        )

    # Same weights, so that only the projection and the dropout may differ.
    first, second = build(), build()
    first.build(X.shape)
    second.build(X.shape)
    for a, b in zip(first.trainable_weights, second.trainable_weights):
        b.assign(a)
    once = to_numpy(first(X, training=True))
    np.testing.assert_array_equal(once, to_numpy(second(X, training=True)))
    assert_differs(first(X, training=True), once)
    again = layer_class.from_config(first.get_config())
    assert again.seed.get_config()["seed"] == 5


def test_blocks_with_seeds_in_a_row_drop_different_entries():
    def kept(dropout_layer):
        generator = dropout_layer._dropout_generator
        return to_numpy(
            keras.random.dropout(keras.ops.ones((5, 7)), 0.5, seed=generator)
        )

    blocks = [PerformerBlock(2, 4, dropout=0.5, seed=s) for s in (3, 4)]
    for block in blocks:
        block.build((None, None, 10))
    masks = [kept(x) for b in blocks for x in (b, b.attention)]
    for n, mask in enumerate(masks):
        for other in masks[:n]:
            assert np.any(mask != other)


def test_a_seeded_initializer_gives_each_kernel_its_own_draw():
    for seed in (3, keras.random.SeedGenerator(3)):
        layer = PerformerAttention(
            2,
            4,
            kernel_initializer=keras.initializers.GlorotUniform(seed=seed),
        )
        layer.build(X.shape)
        kernels = [layer.query.kernel, layer.key.kernel, layer.value.kernel]
        for a, b in ((0, 1), (0, 2), (1, 2)):
            assert_differs(kernels[a], kernels[b])


def test_an_explicit_mask_of_a_block_replaces_an_implicit_one():
    ids = np.array([[3, 4, 5, 0], [3, 4, 5, 6]])
    embedding = keras.layers.Embedding(9, 10, mask_zero=True)
    block = PerformerBlock(2, 4)
    everything = np.ones((2, 4), bool)
    actual = block(embedding(ids), mask=everything)
    plain = keras.ops.convert_to_tensor(to_numpy(embedding(ids)))
    assert_close(actual, block(plain), 1e-6)  # the same computation
    assert_differs(actual[:1], block(embedding(ids))[:1])


@pytest.mark.parametrize("name", ["mask", "query_mask", "value_mask"])
def test_every_mask_is_checked(name):
    layer = PerformerAttention(2, 4)
    given = {name: np.ones((2, 5), bool)}
    call = (X,) if name == "mask" else (X, X[:, :6])
    with pytest.raises(ValueError, match=f"{name}|key_mask"):
        layer(*call, **given)
    symbolic = [keras.Input(x.shape[1:], batch_size=2) for x in call]
    with pytest.raises(ValueError, match=name):
        layer(*symbolic, **given)


def test_a_block_refuses_another_width():
    block = PerformerBlock(2, 4)
    block.build((None, None, 10))
    with pytest.raises(ValueError, match="built for x"):
        block(X[:, :, :1])
    with pytest.raises(ValueError, match="built for x"):
        block(keras.Input((7, 9)))


@pytest.mark.tensorflow_only("JAX knows every length when it traces")
def test_dynamic_lengths_that_differ_are_refused():
    import tensorflow as tf

    layer = PerformerAttention(2, 4, causal=True, num_features=6)
    layer.build(X.shape, X.shape)
    signature = [tf.TensorSpec([None, None, 10])] * 2
    call = tf.function(lambda q, v: layer(q, v), input_signature=signature)
    assert tuple(call(X, X).shape) == (2, 7, 10)
    for q, v in ((X, X[:, :4]), (X[:, :4], X)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="reshape"):
            call(q, v)


def test_a_state_of_another_window_is_refused():
    from keras_performer import feature_maps

    feature_map = feature_maps.get("favor+")
    projection = feature_map.draw_projection(6, 4, seed=1)
    x = keras.random.normal((2, 7, 3, 4), seed=1)

    def run(window, state=None):
        return ops.causal_kernel_attention(
            x,
            x,
            x,
            feature_map=feature_map,
            projection=projection,
            local_window=window,
            initial_state=state,
            return_state=True,
        )[1]

    states = {window: run(window) for window in (0, 4)}
    for window, other in ((0, 4), (4, 0), (8, 4)):
        with pytest.raises(ValueError, match="argument `initial_state`"):
            run(window, states[other])
    with pytest.raises(ValueError, match="argument `initial_state`"):
        run(0, states[0]["sums"])
