"""Dropout of replicas: the masks of one device, each for its own rows."""

import keras
import numpy as np
import pytest

from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from keras_performer.layers import dropout
from tests.testing import TraceCounter
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy
from tools import compile_for_tpu

tf = pytest.importorskip("tensorflow", reason="tf.distribute is TensorFlow's")
pytestmark = pytest.mark.tensorflow_only("tf.distribute is TensorFlow's")

ROWS = 3  # of each replica, of 7 x 5: their numbers begin within a block
DTYPES = ("float32", "float16", "bfloat16", "float64")


def run(strategy, function, x):
    """`function` of each replica's rows of `x`, one after the other."""
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: x[context.replica_id_in_sync_group * ROWS :][:ROWS]
    )
    outputs = tf.function(lambda part: strategy.run(function, args=(part,)))(
        parts
    )
    return [
        np.concatenate([to_numpy(part) for part in values.values])
        for values in outputs
    ]


# Of Keras's seeds, all that it takes in another way: below 0, and large.
SEEDS = (3, -7, 2**31 - 2, 2**40 + 1)


@pytest.mark.parametrize(
    ("dtype", "seed"),
    [(dtype, 3) for dtype in DTYPES]
    + [("float32", seed) for seed in SEEDS[1:]],
)
def test_replicas_drop_what_one_device_does(dtype, seed, two_replicas):
    x = tf.ones((2 * ROWS, 7, 5), dtype)
    with two_replicas.scope():
        generators = [keras.random.SeedGenerator(seed) for _ in range(2)]
    expected = [
        to_numpy(keras.random.dropout(x, 0.3, seed=generators[0]))
        for _ in range(2)
    ]
    found = run(
        two_replicas,
        lambda part: [dropout.drop(part, 0.3, generators[1]) for _ in range(2)],
        x,
    )
    np.testing.assert_array_equal(found, expected)
    # Keras's own repeats the mask of the first replica.
    (own,) = run(
        two_replicas,
        lambda part: [keras.random.dropout(part, 0.3, seed=generators[0])],
        x,
    )
    np.testing.assert_array_equal(own[:ROWS], own[ROWS:])
    assert_differs(found[0][:ROWS], found[0][ROWS:])
    assert_differs(found[0], found[1])


@pytest.mark.parametrize("jit_compile", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_whole(dtype, jit_compile):
    seed = tf.constant((5, 7))

    @tf.function(jit_compile=jit_compile)
    def whole():
        return tf.random.stateless_uniform((11, 7, 5), seed, dtype=dtype)

    signature = (
        tf.TensorSpec((None, 7, 5), dtype), tf.TensorSpec((), tf.int32),
    )

    @tf.function(jit_compile=jit_compile, input_signature=signature)
    def part(x, replica):
        numbers = dropout._uniform(x, seed, replica)
        assert numbers.shape[1:] == (7, 5)
        return numbers

    expected = to_numpy(whole())
    for rows in (1, 2, 3):
        for replica in range(3):
            found = part(tf.zeros((rows, 7, 5), dtype), replica)
            np.testing.assert_array_equal(
                to_numpy(found), expected[replica * rows :][:rows]
            )


def test_xla_takes_sizes_that_data_decide():
    seed = tf.constant((5, -7))

    @tf.function(jit_compile=True)
    def part(x, keep):
        return dropout._uniform(tf.boolean_mask(x, keep), seed, 1)

    keep = np.array([True, False, True, True])
    found = part(tf.zeros((4, 5)), keep)
    expected = part(tf.zeros((3, 5)), keep[:3] | True)
    assert_close(found, expected, 0)


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ("v2:2x2x1", "v5e:1x1"))
def test_rows_compile_for_a_tpu(topology):
    x, replica = tf.zeros((ROWS, 7, 5), "bfloat16"), tf.constant(3)
    text = compile_for_tpu.lower(
        lambda x, replica: dropout._uniform(x, (5, -7), replica), x, replica
    )
    # What is compiled here is what runs there, not the generator of a CPU.
    assert "rng_bit_generator" in text and "PHILOX" in text
    assert compile_for_tpu.compile_text(text, topology).fits


LAYERS = {
    "attention": lambda **kwargs: PerformerAttention(
        2, 5, dropout=0.4, seed=1, **kwargs
    ),
    "block": lambda **kwargs: PerformerBlock(
        2, 13, key_dim=3, dropout=0.4, seed=1, **kwargs
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_and_its_gradient_are_those_of_one_device(kind, two_replicas):
    x = normal(2 * ROWS, 7, 11)
    weight = normal(2 * ROWS, 7, 11, seed=1)
    with two_replicas.scope():
        one, many = LAYERS[kind](), LAYERS[kind]()
        one.build(x.shape), many.build(x.shape)
        many.set_weights(one.get_weights())

    def gradients(layer, both):
        inputs, factors = both[..., :11], both[..., 11:]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
        return outputs, tape.gradient(outputs, inputs, factors)

    both = tf.concat([x, weight], -1)
    found = run(two_replicas, lambda part: gradients(many, part), both)
    # The same operations on fewer rows: float32 roundings of some products.
    for value, other in zip(found, gradients(one, both), strict=True):
        assert_close(value, other, 1e-5)
    assert_differs(one(x, training=True), one(x, training=False))


SCOPES = {
    "full": {"mode": "full"},
    # The layer's output has 2 * 7 * 11 entries.
    "larger": {"mode": "larger_than", "output_size_threshold": 100},
    "named": {"mode": "list_of_layers", "layer_names": ["mine"]},
}


@pytest.mark.parametrize(
    ("scope", "where", "eagerly"),
    [
        ("full", "scope", True),
        ("full", "scope", False),
        ("full", "later", False),
        ("named", "scope", False),
        ("larger", "scope", False),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_recomputed_has_the_mask_of_the_output(
    kind, scope, where, eagerly, monkeypatch
):
    x, weight = normal(2, 7, 11), normal(2, 7, 11, seed=1)
    keep = np.arange(7) < np.array([[7], [4]])
    plain = LAYERS[kind](name="mine")
    plain.build(x.shape)
    with keras.RematScope(**SCOPES[scope]):
        recomputed = LAYERS[kind](name="mine")
        if where == "scope":  # with its sublayers
            recomputed.build(x.shape)
    if where == "later":
        recomputed.build(x.shape)
    recomputed.set_weights(plain.get_weights())
    counter = TraceCounter(tf.recompute_grad)
    monkeypatch.setattr(tf, "recompute_grad", counter)

    def gradients(layer):
        with tf.GradientTape() as tape:
            output = layer(x, mask=tf.constant(keep), training=True)
            loss = tf.reduce_sum(output * weight)
        return [output, *tape.gradient(loss, layer.trainable_variables)]

    for count in (1, 2):
        run = gradients if eagerly else tf.function(gradients)
        for found, expected in zip(run(recomputed), run(plain), strict=True):
            assert_close(found, expected, 1e-5)  # float32 roundings
        assert counter.count == count
    # A generator gives each seed once.
    for one, other in zip(
        plain._dropout_generators(),
        recomputed._dropout_generators(),
        strict=True,
    ):
        np.testing.assert_array_equal(
            to_numpy(one.state), to_numpy(other.state)
        )


class Twice(PerformerBlock):
    def call(self, x, training=None):
        once = super().call(x, training=training)
        return super().call(once, training=training)


def test_more_masks_than_a_layer_names_are_an_error():
    with keras.RematScope(mode="full"):
        layer = Twice(2, 13, key_dim=3, dropout=0.4)
    layer.build((2, 7, 11))
    with pytest.raises(RuntimeError, match="_dropout_generators"):
        layer(normal(2, 7, 11), training=True)
