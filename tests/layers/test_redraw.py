"""Redrawing the projection: counted, repeatable, and only in training."""

import keras
import numpy as np
import pytest

from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy

if ON_TENSORFLOW:
    import tensorflow as tf

X = normal(8, 7, 12)


def attention(redraw_interval=2, **kwargs):
    kwargs = {"num_features": 10, "causal": True, "seed": 3, **kwargs}
    return PerformerAttention(2, 4, redraw_interval=redraw_interval, **kwargs)


def block(redraw_interval=2, **kwargs):
    kwargs = {"num_features": 10, "causal": True, "seed": 3, **kwargs}
    return PerformerBlock(2, 13, redraw_interval=redraw_interval, **kwargs)


KINDS = pytest.mark.parametrize("make", [attention, block])
# A block redraws through the attention layer inside it, so that these long
# tests of it are of both.
MOSTLY_BLOCKS = pytest.mark.parametrize(
    "make", [pytest.param(attention, marks=pytest.mark.slow), block]
)


def inner(layer):
    return getattr(layer, "attention", layer)


def projection(layer):
    return to_numpy(inner(layer).projection)


def steps(layer):
    return int(to_numpy(inner(layer)._redraw_state)[1])


def model_of(*layers, jit_compile=False, **kwargs):
    inputs = outputs = keras.Input(X.shape[1:])
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-2), "mse", jit_compile=jit_compile, **kwargs
    )
    # Or what is saved before training has no optimizer to restore.
    model.optimizer.build(model.trainable_variables)
    return model


class Recorder(keras.callbacks.Callback):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.projections = []

    def on_train_batch_end(self, batch, logs=None):
        if not ON_TENSORFLOW:
            self.model.jax_state_sync()  # within an epoch, JAX keeps its own
        self.projections.append(projection(self.layer))


def changes(projections):
    """Indices of the steps at which the projection became another one."""
    return [
        index
        for index in range(1, len(projections))
        if np.any(projections[index] != projections[index - 1])
    ]


@KINDS
def test_o31_inference_never_draws_nor_counts(make):
    layer = make()
    model = model_of(layer)
    before = projection(layer)
    outputs = [to_numpy(layer(X, training=False)) for _ in range(10)]
    outputs += [model.predict(X, verbose=0) for _ in range(2)]
    model.evaluate(X, X, verbose=0)
    for output in outputs:
        # Rounding: `predict` runs as one compiled function.
        assert_close(output, outputs[0], 1e-6)
    np.testing.assert_array_equal(projection(layer), before)
    assert steps(layer) == 0
    layer(X, training=True)
    assert steps(layer) == 1


@pytest.mark.parametrize("jit_compile", [False, True])
@KINDS
def test_o36_seven_steps_of_fit_see_three_projections(make, jit_compile):
    layer = make(redraw_interval=3)
    model = model_of(layer, jit_compile=jit_compile)
    recorder = Recorder(layer)
    x = np.concatenate([X] * 7)
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[recorder])
    assert changes(recorder.projections) == [3, 6]
    assert steps(layer) == 7
    # Three different ones, not two in turn.
    assert_differs(recorder.projections[0], recorder.projections[6])
    rows = recorder.projections[6][:4]
    np.testing.assert_allclose(
        rows @ rows.T, np.diag(np.diag(rows @ rows.T)), atol=1e-4
    )


@pytest.mark.tensorflow_only("the loop is tf.function's")
@pytest.mark.parametrize("jit_compile", [False, True])
@MOSTLY_BLOCKS
def test_a_loop_of_ones_own(make, jit_compile):
    layer = make(redraw_interval=2)
    optimizer = keras.optimizers.SGD(1e-2)
    layer.build(X.shape)
    optimizer.build(layer.trainable_variables)

    @tf.function(jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x, training=True)))
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
        return loss

    seen = []
    for _ in range(5):
        assert np.isfinite(step(tf.constant(X)))
        seen.append(projection(layer))
    assert changes(seen) == [2, 4]


@pytest.mark.tensorflow_only("get_concrete_function is TensorFlow's")
@KINDS
def test_o35_tracing_never_draws(make):
    layer = make(redraw_interval=1)
    layer.build(X.shape)
    layer(X, training=True)
    before = projection(layer)
    function = tf.function(lambda x: layer(x, training=True))
    for length in (7, 5):
        function.get_concrete_function(tf.TensorSpec((2, length, 12)))
    layer(keras.Input((7, 12)), training=True)
    np.testing.assert_array_equal(projection(layer), before)
    assert steps(layer) == 1
    function(X)
    assert_differs(projection(layer), before)
    assert steps(layer) == 2


@pytest.mark.parametrize(
    "seed", [7, None, lambda: keras.random.SeedGenerator(7)]
)
def test_o33_every_spelling_of_a_seed_redraws_alike(seed):
    def draws():
        layer = attention(1, seed=seed() if callable(seed) else seed)
        layer.build(X.shape)
        drawn = []
        for _ in range(3):
            layer(X, training=True)
            drawn.append(projection(layer))
        return drawn

    first, second = draws(), draws()
    assert changes(first) == [1, 2]
    for one, other in zip(first, second):
        if seed is None:
            assert_differs(one, other)
        else:
            np.testing.assert_array_equal(one, other)


def test_layers_that_share_a_generator_draw_apart():
    generator = keras.random.SeedGenerator(7)
    layers = [attention(1, seed=generator) for _ in range(2)]
    for layer in layers:
        layer.build(X.shape)
    for _ in range(3):
        assert_differs(*[projection(layer) for layer in layers])
        for layer in layers:
            layer(X, training=True)
    for layer in layers:
        layer.redraw_projection()
    assert_differs(*[projection(layer) for layer in layers])


@pytest.mark.parametrize("feature_map", ["favor+", "favor++"])
@MOSTLY_BLOCKS
def test_two_times_two_epochs_equal_four(make, feature_map, tmp_path):
    # Eight steps in all, redrawn at 3 and 6: the file is written between.
    x = np.concatenate([X] * 2)

    def fit(model, epochs):
        model.fit(
            x, x, batch_size=8, epochs=epochs, shuffle=False, verbose=0
        )

    straight = model_of(make(3, seed=None, feature_map=feature_map))
    straight.save(tmp_path / "first.keras")
    fit(straight, 4)
    resumed = keras.models.load_model(tmp_path / "first.keras")
    fit(resumed, 2)
    path = tmp_path / "half.keras"
    resumed.save(path)
    keras.backend.clear_session(free_memory=False)
    resumed = keras.models.load_model(path)
    fit(resumed, 2)
    assert steps(resumed.layers[1]) == steps(straight.layers[1]) == 8
    np.testing.assert_array_equal(
        projection(resumed.layers[1]), projection(straight.layers[1])
    )
    for one, other in zip(resumed.weights, straight.weights):
        # The same operations in the same order, compiled twice.
        assert_close(to_numpy(one), to_numpy(other), 1e-6)


@pytest.mark.tensorflow_only("JAX runs the steps one by one")
def test_several_steps_in_one_execution_are_counted_each():
    layer = attention(redraw_interval=3)
    model = model_of(layer, steps_per_execution=2)
    x = np.concatenate([X] * 4)
    model.fit(x, x, batch_size=8, verbose=0)
    assert steps(layer) == 4
    twin = attention(redraw_interval=3)
    twin.build(X.shape)
    for _ in range(4):
        twin(X, training=True)
    np.testing.assert_array_equal(projection(layer), projection(twin))


@pytest.mark.tensorflow_only("MirroredStrategy is TensorFlow's")
@MOSTLY_BLOCKS
def test_o37_replicas_hold_the_same_projection(make, two_replicas):
    with two_replicas.scope():
        layer = make(redraw_interval=1, feature_map="favor++")
        model = model_of(layer)
    first = projection(layer)
    x = np.concatenate([X] * 3)
    model.fit(x, x, batch_size=8, verbose=0)
    assert steps(layer) == 3
    assert_differs(projection(layer), first)
    for weight in layer.non_trainable_weights:
        copies = two_replicas.experimental_local_results(weight.value)
        assert len(copies) == 2
        np.testing.assert_array_equal(*[to_numpy(copy) for copy in copies])
    # And the same as a single device draws.
    twin = make(redraw_interval=1, feature_map="favor++")
    twin.build(X.shape)
    for _ in range(3):
        twin(X, training=True)
    np.testing.assert_array_equal(projection(layer), projection(twin))


@pytest.mark.tensorflow_only("Keras recomputes by tf.recompute_grad")
@MOSTLY_BLOCKS
def test_recomputation_sees_the_projection_of_the_output(make):
    # Interval 1: a draw in the recomputation would change the features.
    plain = make(redraw_interval=1)
    with keras.RematScope(mode="full"):
        recomputed = make(redraw_interval=1)
    plain.build(X.shape)
    recomputed.build(X.shape)
    recomputed.set_weights(plain.get_weights())

    def gradients(layer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(layer(X, training=True)))
        return tape.gradient(loss, layer.trainable_variables)

    for count in (1, 2, 3):
        one = tf.function(gradients)(plain)
        other = tf.function(gradients)(recomputed)
        for a, b in zip(one, other, strict=True):
            assert_close(to_numpy(b), to_numpy(a), 1e-5)
        assert steps(plain) == steps(recomputed) == count
        np.testing.assert_array_equal(
            projection(plain), projection(recomputed)
        )


def test_a_draw_by_hand():
    layer = attention(None)
    with pytest.raises(ValueError, match="not built yet"):
        layer.redraw_projection()
    layer.build(X.shape)
    before = projection(layer)
    count = len(layer.weights)
    layer.redraw_projection()
    once = projection(layer)
    assert_differs(once, before)
    layer.redraw_projection()
    assert_differs(projection(layer), once)
    layer.redraw_projection(seed=5)
    fifth = projection(layer)
    layer.redraw_projection()
    layer.redraw_projection(seed=5)
    np.testing.assert_array_equal(projection(layer), fifth)
    assert len(layer.weights) == count
    twin = attention(None)
    twin.build(X.shape)
    twin.redraw_projection()
    np.testing.assert_array_equal(projection(twin), once)
    exact = attention(None, feature_map="exact")
    exact.build(X.shape)
    with pytest.raises(ValueError, match="Exact draws none"):
        exact.redraw_projection()


def test_a_redraw_needs_something_to_redraw():
    with pytest.raises(ValueError, match="argument `redraw_interval`"):
        attention(5, feature_map="exact")
    with pytest.raises(ValueError, match="argument `redraw_interval`"):
        block(5, feature_map="hedgehog")


def test_a_layer_that_a_model_uses_twice_has_one_step():
    layer = attention(redraw_interval=2, feature_map="favor++")
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, layer(layer(inputs)))
    for count in (1, 2, 3):
        model(X, training=True)
        assert steps(layer) == count
    # By itself, each call is a step.
    layer(X, training=True)
    assert steps(layer) == 4


def test_a_tied_layer_does_not_see_the_future_in_training():
    layer = attention(None, feature_map="favor++", local_window=0)
    inputs = keras.Input((None, 12))
    model = keras.Model(inputs, layer(layer(inputs)))
    model(X, training=True)
    weights = model.get_weights()
    before = to_numpy(model(X, training=True))
    model.set_weights(weights)
    changed = X.copy()
    changed[:, -1] *= 5
    after = to_numpy(model(changed, training=True))
    assert_close(after[:, :-1], before[:, :-1], 1e-5)


@KINDS
def test_a_frozen_layer_keeps_its_projection(make):
    layer = make(redraw_interval=1, feature_map="favor++")
    layer.build(X.shape)
    layer(X, training=True)
    layer.trainable = False
    before = [to_numpy(weight) for weight in layer.weights]
    for _ in range(2):
        layer(X, training=True)
    for weight, value in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), value)


@pytest.mark.tensorflow_only("MirroredStrategy is TensorFlow's")
def test_recomputation_on_replicas_goes_on_after_a_new_length(two_replicas):
    with two_replicas.scope():
        with keras.RematScope(mode="full"):
            layer = block(redraw_interval=1, feature_map="favor++")
        inputs = keras.Input((None, 12))
        model = keras.Model(inputs, layer(inputs))
        model.compile("sgd", "mse")
    for count, length in enumerate((7, 5, 7), start=1):
        model.fit(X[:, :length], X[:, :length], batch_size=8, verbose=0)
        assert steps(layer) == count


@pytest.mark.skipif(ON_TENSORFLOW, reason="for the other backends")
def test_jax_cannot_recompute_what_adapts():
    with keras.RematScope(mode="full"):
        layer = block(None, feature_map="favor++")
    layer.build(X.shape)
    with pytest.raises(NotImplementedError, match="adapts to its inputs"):
        layer(X, training=True)
