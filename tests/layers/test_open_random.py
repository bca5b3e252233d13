"""Publicly reported faults of random state, as tests: cases O-31 to O-35."""

import keras
import numpy as np
import pytest

from tests.layers.dense_oracle import VARIANTS
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_differs
from tests.testing import copy_weights
from tests.testing import normal
from tests.testing import seed_states
from tests.testing import to_numpy

if ON_TENSORFLOW:
    import tensorflow as tf

LAYERS = pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("attention", "favor"),
        ("attention", "relu-causal"),
        ("block", "favor-window"),
    ],
)
KINDS = pytest.mark.parametrize("kind", ["attention", "block"])


def projection_of(layer):
    return getattr(layer, "attention", layer).projection


def make(kind, name="favor", **kwargs):
    return getattr(VARIANTS[name], kind)(**kwargs)


@LAYERS
def test_o31_inference_is_the_same_at_every_call(kind, name):
    layer = make(kind, name, dropout=0.5)
    inputs = keras.Input((7, 11))
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    before = to_numpy(projection_of(layer).value)
    states = [to_numpy(state.value) for state in seed_states(layer)]
    x = normal(2, 7, 11)
    outputs = [to_numpy(layer(x, training=False)) for _ in range(10)]
    predicted = [model.predict(x, verbose=0) for _ in range(2)]
    model.evaluate(x, x, verbose=0)
    predicted.append(model.predict(x, verbose=0))
    for output in outputs:
        np.testing.assert_array_equal(output, outputs[0])
    for output in predicted:
        np.testing.assert_array_equal(output, predicted[0])
    np.testing.assert_array_equal(to_numpy(projection_of(layer).value), before)
    for state, value in zip(seed_states(layer), states, strict=True):
        np.testing.assert_array_equal(to_numpy(state.value), value)


@LAYERS
def test_o32_the_projection_is_a_weight_from_build_on(kind, name, tmp_path):
    used, fresh = make(kind, name), make(kind, name)
    x = normal(2, 7, 11)
    output = to_numpy(used(x))
    fresh.build(x.shape)
    projection = projection_of(fresh)
    paths = [weight.path for weight in fresh.non_trainable_weights]
    assert paths == [projection.path]
    assert projection.path.endswith("projection")
    assert not projection.trainable
    assert_differs(projection_of(used), projection)

    class Holder(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.built = True

    path = tmp_path / "used.weights.h5"
    Holder(used).save_weights(path)
    Holder(fresh).load_weights(path)
    # Bit for bit: the same weights in the same program.
    np.testing.assert_array_equal(to_numpy(fresh(x)), output)


def test_o32_exact_attention_has_no_projection():
    layer = VARIANTS["exact"].attention()
    layer.build((2, 7, 11))
    assert layer.projection is None
    assert not layer.non_trainable_weights


SEEDS = {
    "int": lambda: 7,
    "generator": lambda: keras.random.SeedGenerator(7),
}


@KINDS
@pytest.mark.parametrize("spelling", SEEDS)
def test_o33_every_spelling_of_a_seed_is_repeatable(spelling, kind):
    def draw(seed):
        layer = make(kind, seed=seed)
        layer.build((None, None, 11))
        return to_numpy(projection_of(layer))

    first, second = draw(SEEDS[spelling]()), draw(SEEDS[spelling]())
    np.testing.assert_array_equal(first, second)
    assert_differs(draw(8), first)


@pytest.mark.one_in(3)
@pytest.mark.tensorflow_only("only a tf.function builds while it traces")
@KINDS
@pytest.mark.parametrize("spelling", SEEDS)
def test_o33_a_layer_may_be_built_inside_a_function(spelling, kind):
    def draw_and_call():
        layer = make(kind, seed=SEEDS[spelling](), dropout=0.3)
        shape = tf.TensorSpec((None, None, 11), "float32")
        function = tf.function(
            lambda x: layer(x, training=True), input_signature=[shape]
        )
        output = function(normal(2, 7, 11))
        assert tuple(function(normal(3, 5, 11)).shape) == (3, 5, 11)
        assert np.all(np.isfinite(to_numpy(output)))
        return to_numpy(projection_of(layer))

    np.testing.assert_array_equal(draw_and_call(), draw_and_call())


@LAYERS
def test_o34_the_seed_decides_dropout_too(kind, name):
    x = normal(2, 7, 11)
    layers = [make(kind, name, dropout=0.5, seed=7) for _ in range(2)]
    for layer in layers:
        layer.build(x.shape)
        assert layer.get_config()["seed"] == 7
    copy_weights(*layers)
    first, second = [to_numpy(layer(x, training=True)) for layer in layers]
    np.testing.assert_array_equal(first, second)
    # The dropout is there, and its next mask is another one.
    assert_differs(layers[0](x, training=True), first)
    assert_differs(layers[0](x, training=False), first)


@LAYERS
def test_o34_layers_without_a_seed_draw_differently(kind, name):
    layers = [make(kind, name) for _ in range(2)]
    for layer in layers:
        layer.build((2, 7, 11))
        assert layer.get_config()["seed"] is None
    assert_differs(*[projection_of(layer) for layer in layers])


def test_o34_blocks_of_one_model_draw_differently():
    inputs = keras.Input((7, 11))
    blocks = [make("block") for _ in range(2)]
    keras.Model(inputs, blocks[1](blocks[0](inputs)))
    assert_differs(*[projection_of(block) for block in blocks])


@pytest.mark.tensorflow_only("get_concrete_function is TensorFlow's")
@LAYERS
def test_o35_tracing_does_not_advance_the_random_state(kind, name):
    twins = [make(kind, name, dropout=0.5, seed=7) for _ in range(2)]
    for layer in twins:
        layer.build((2, 7, 11))
    copy_weights(*twins)
    functions = [
        tf.function(lambda x, layer=layer: layer(x, training=True))
        for layer in twins
    ]
    states = seed_states(twins[0])
    assert states
    before = [to_numpy(state.value) for state in states]
    for length in (7, 5):
        functions[0].get_concrete_function(
            tf.TensorSpec((2, length, 11), "float32")
        )
    for state, value in zip(states, before, strict=True):
        np.testing.assert_array_equal(to_numpy(state.value), value)
    x = normal(2, 7, 11)
    outputs = [[to_numpy(f(x)) for _ in range(3)] for f in functions]
    np.testing.assert_array_equal(*outputs)
    assert_differs(outputs[0][0], outputs[0][1])
