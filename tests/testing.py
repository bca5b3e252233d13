"""Helpers of all tests, and the ladder of checks that every layer climbs.

The helpers run on each supported backend. Arrays go in and come out as NumPy,
so that the expected values never depend on the code under test.
"""

import json

import keras
import numpy as np

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if ON_TENSORFLOW:
    import tensorflow as tf
else:
    import jax

MIXED_POLICIES = ("mixed_float16", "mixed_bfloat16")


# Arrays and tolerances.


def normal(*shape, scale=1.0, seed=0):
    """A float32 array of draws from N(0, scale^2)."""
    draws = np.random.default_rng(seed).standard_normal(shape)
    return (scale * draws).astype("float32")


def to_numpy(tensor):
    """A NumPy array; half types become float32, which NumPy can compare."""
    array = np.asarray(tensor)
    if keras.backend.standardize_dtype(array.dtype) in ("bfloat16", "float16"):
        return array.astype("float32")
    return array


def relative_error(actual, expected):
    """Largest difference, relative to the largest expected entry."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    difference = np.max(np.abs(actual - expected), initial=0.0)
    scale = np.max(np.abs(expected), initial=0.0)
    return difference / max(scale, np.finfo("float32").tiny)


def assert_close(actual, expected, tolerance):
    """Equal shapes, finite values, `relative_error` within the tolerance."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.all(np.isfinite(actual)), "values that are not finite"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


def assert_differs(actual, other, least=1e-3):
    """The guard of an equality test: these two must not be equal."""
    error = relative_error(actual, other)
    assert error > least, f"relative error {error:.2e}, expected > {least:.0e}"


def assert_mean(draws, expected, standard_errors=4):
    """The mean over axis 0 is within some standard errors of `expected`."""
    draws = np.asarray(draws, "float64")
    error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    distance = np.abs(draws.mean(axis=0) - expected)
    worst = np.max(distance / np.maximum(error, np.finfo("float64").tiny))
    assert worst <= standard_errors, f"{worst:.2f} standard errors away"


# Tracing and gradients.


class TraceCounter:
    """Counts how often Python runs a function, that is, how often it traces.

    Args:
        function: The function to count.

    Attributes:
        count: Number of runs so far.
    """

    def __init__(self, function):
        self.function = function
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)


def compiled(function, mode="graph", signature=None):
    """The function run eagerly, as a graph, or compiled by XLA.

    Args:
        function: A function of tensors.
        mode: "eager", "graph" or "xla". JAX has one compiled form for both.
        signature: Shapes of the float32 arguments, None for unknown sizes.
            JAX has no unknown sizes and ignores it.

    Returns:
        A function of tensors.
    """
    if mode == "eager":
        return function
    if not ON_TENSORFLOW:
        return jax.jit(function)
    if signature is not None:
        signature = [tf.TensorSpec(shape, "float32") for shape in signature]
    return tf.function(
        function,
        input_signature=signature,
        jit_compile=mode == "xla",
        autograph=False,
    )


def input_gradient(function):
    """The function of `(x, cotangent)` that gives `cotangent . dy / dx`."""

    def on_tensorflow(x, cotangent):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            total = tf.reduce_sum(y * tf.cast(cotangent, y.dtype))
        # A path that does not exist is a gradient of zero, not None.
        return tape.gradient(
            total, x, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    def on_jax(x, cotangent):
        x = jax.numpy.asarray(x)
        return jax.grad(lambda x: (function(x) * cotangent).sum())(x)

    return on_tensorflow if ON_TENSORFLOW else on_jax


def weight_gradients(layer, cotangent, *args, **kwargs):
    """Gradients of `sum(cotangent * layer(...))`, by the weight's path."""
    weights = layer.trainable_variables
    if ON_TENSORFLOW:
        with tf.GradientTape() as tape:
            y = layer(*args, **kwargs)
            total = tf.reduce_sum(y * tf.cast(cotangent, y.dtype))
        gradients = tape.gradient(
            total, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
    else:
        fixed = [v.value for v in layer.non_trainable_variables]

        def total(trainable):
            y, _ = layer.stateless_call(trainable, fixed, *args, **kwargs)
            return (y * cotangent).sum()

        gradients = jax.grad(total)([v.value for v in weights])
    return {
        w.path: to_numpy(g) for w, g in zip(weights, gradients, strict=True)
    }


# Layers.


def seed_states(layer):
    """The random states below a layer, each one once."""
    states = {
        id(variable): variable
        for variable in layer.variables
        if variable.path.endswith("seed_generator_state")
    }
    return list(states.values())


def copy_weights(source, target):
    """Gives a built layer the values of another one with equal shapes."""
    assert len(source.weights) == len(target.weights)
    target.set_weights(source.get_weights())


@keras.saving.register_keras_serializable("keras_performer_tests")
class MaskProbe(keras.layers.Layer):
    """Gives back the mask that reaches it, as numbers; -1 where none does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, input_shape):
        self.built = True

    def call(self, inputs, mask=None):
        if mask is None:
            return keras.ops.full_like(inputs[..., 0], -1)
        return keras.ops.cast(mask, inputs.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape[:-1]


class Ladder:
    """Checks of one layer, from its configuration to a training step.

    Args:
        layer_class: The class.
        init_kwargs: Its constructor arguments.
        inputs: Dict from call argument to NumPy array, in call order. The
            first one is passed by position.
        output_shape: Expected shape of the output for these inputs.
        trainable: Expected number of trainable weights.
        non_trainable: Expected number of non-trainable weights.
        seeds: Expected number of random states.
        losses: Expected number of losses after a call.
        moving: Path endings of the weights that a step must change.
        fixed: Path endings of the weights that no step may change, and that
            are float32 under every policy.
    """

    def __init__(
        self,
        layer_class,
        init_kwargs,
        inputs,
        output_shape,
        trainable,
        non_trainable=0,
        seeds=0,
        losses=0,
        moving=("kernel",),
        fixed=("projection",),
    ):
        self.layer_class = layer_class
        self.init_kwargs = init_kwargs
        self.inputs = inputs
        self.output_shape = output_shape
        self.counts = (trainable, non_trainable, seeds)
        self.losses = losses
        self.moving = moving
        self.fixed = fixed
        self.integer = all(
            np.issubdtype(x.dtype, np.integer) for x in inputs.values()
        )

    def climb(self):
        """Runs every check but the one that waits for XLA."""
        self.check_serialisation()
        self.check_build()
        self.check_symbolic_call()
        self.check_eager_call()
        self.check_masking()
        self.check_fit_step(jit_compile=False)
        for policy in MIXED_POLICIES:
            self.check_mixed_precision(policy)
        if ON_TENSORFLOW:
            # JAX has no float64 unless the whole process asks for it.
            self.check_float64()

    def make(self, **kwargs):
        return self.layer_class(**{**self.init_kwargs, **kwargs})

    def call(self, layer, inputs, **kwargs):
        first, *others = inputs
        others = {name: inputs[name] for name in others}
        return layer(inputs[first], **others, **kwargs)

    def shapes(self, free_axes=()):
        """Shapes as `build` takes them, with some axes unknown."""

        def shape(x):
            return tuple(
                None if axis in free_axes else size
                for axis, size in enumerate(x.shape)
            )

        return [shape(x) for x in self.inputs.values()]

    def by_shape(self, method, free_axes=()):
        """Calls a method that takes one `<argument>_shape` per input."""
        first, *others = self.shapes(free_axes)
        names = [f"{name}_shape" for name in list(self.inputs)[1:]]
        return method(first, **dict(zip(names, others, strict=True)))

    def symbolic(self, free_axes=()):
        shapes = self.shapes(free_axes)
        return {
            name: keras.KerasTensor(shape, x.dtype.name)
            for (name, x), shape in zip(
                self.inputs.items(), shapes, strict=True
            )
        }

    def check_serialisation(self):
        layer = self.make()
        config = layer.get_config()
        text = json.dumps(config)
        revived = self.layer_class.from_config(json.loads(text))
        # Text on both sides: JSON knows no tuples.
        assert json.dumps(revived.get_config()) == text
        assert set(dir(revived)) == set(dir(layer))

        wrapped = keras.saving.serialize_keras_object(layer)
        name = self.layer_class.__name__
        assert wrapped["registered_name"] == f"keras_performer>{name}"
        revived = keras.saving.deserialize_keras_object(
            json.loads(json.dumps(wrapped))
        )
        assert type(revived) is self.layer_class
        assert json.dumps(revived.get_config()) == text
        assert set(dir(revived)) == set(dir(layer))

    def check_counts(self, layer):
        assert layer.built
        counts = (
            len(layer.trainable_weights),
            len(layer.non_trainable_weights),
            len(seed_states(layer)),
        )
        assert counts == self.counts, (counts, self.counts)

    def check_build(self):
        for free_axes in ((), (0, 1)):
            layer = self.make()
            self.by_shape(layer.build, free_axes)
            self.check_counts(layer)
            before = [id(v) for v in layer.variables]
            self.call(layer, self.inputs)
            assert [id(v) for v in layer.variables] == before
        paths = [weight.path for weight in layer.weights]
        assert len(set(paths)) == len(paths), paths
        assert all(path.startswith(layer.name + "/") for path in paths), paths

    def check_symbolic_call(self):
        for free_axes in ((), (0,), (0, 1)):
            layer = self.make()
            tensors = self.symbolic(free_axes)
            output = self.call(layer, tensors)
            self.check_counts(layer)
            expected = tuple(
                None if axis in free_axes else size
                for axis, size in enumerate(self.output_shape)
            )
            assert tuple(output.shape) == expected
            assert output.dtype == layer.compute_dtype
            by_shape = self.by_shape(layer.compute_output_shape, free_axes)
            assert tuple(by_shape) == expected
            by_spec = self.call(layer.compute_output_spec, tensors)
            assert tuple(by_spec.shape) == expected
            assert by_spec.dtype == layer.compute_dtype

    def check_eager_call(self):
        layer = self.make()
        output = self.call(layer, self.inputs)
        self.check_counts(layer)
        assert tuple(output.shape) == self.output_shape
        dtype = keras.backend.standardize_dtype(output.dtype)
        assert dtype == layer.compute_dtype
        assert np.all(np.isfinite(to_numpy(output)))
        assert len(layer.losses) == self.losses
        # Inference draws nothing, so that a second call gives the same bits.
        again = self.call(layer, self.inputs)
        np.testing.assert_array_equal(to_numpy(output), to_numpy(again))

    def check_masking(self):
        layer = self.make()
        assert layer.supports_masking
        if self.integer:
            # Ids make their own mask, where they make one at all.
            return
        inputs = {
            name: keras.Input(x.shape[1:], name=name)
            for name, x in self.inputs.items()
        }
        masked = {
            name: keras.layers.Masking()(x) for name, x in inputs.items()
        }
        seen = MaskProbe()(self.call(layer, masked))
        padded = {name: x.copy() for name, x in self.inputs.items()}
        for x in padded.values():
            x[0, -1] = 0.0
        seen = to_numpy(keras.Model(inputs, seen)(padded))
        # The output has the positions of the first input, and so its mask.
        expected = np.ones(self.output_shape[:2])
        expected[0, -1] = 0.0
        np.testing.assert_array_equal(seen, expected)

    def check_fit_step(self, jit_compile):
        layer = self.make()
        inputs = {
            name: keras.Input(x.shape[1:], dtype=x.dtype.name, name=name)
            for name, x in self.inputs.items()
        }
        model = keras.Model(inputs, self.call(layer, inputs))
        model.compile("sgd", "mse", jit_compile=jit_compile)
        before = {w.path: to_numpy(w.value) for w in layer.weights}
        target = normal(*self.output_shape, seed=5)
        history = model.fit(
            self.inputs,
            target,
            batch_size=len(target),
            verbose=0,
        )
        assert np.isfinite(history.history["loss"][0])
        for weight in layer.weights:
            after = to_numpy(weight.value)
            changed = np.any(before[weight.path] != after)
            assert np.all(np.isfinite(after)), weight.path
            if weight.path.endswith(self.moving):
                assert changed, f"{weight.path} did not learn"
            if weight.path.endswith(self.fixed):
                assert not changed, f"{weight.path} changed"

    def check_mixed_precision(self, policy):
        layer = self.make(dtype=policy)
        output = self.call(layer, self.inputs)
        dtype = keras.backend.standardize_dtype(output.dtype)
        assert dtype == layer.compute_dtype == policy.removeprefix("mixed_")
        assert np.all(np.isfinite(to_numpy(output)))
        spec = self.call(layer.compute_output_spec, self.symbolic())
        assert spec.dtype == dtype
        for weight in layer.weights:
            # `mixed` means float32 variables, the projection among them.
            assert weight.dtype == "float32", weight.path
        assert layer.get_config()["dtype"]["config"]["name"] == policy

    def check_float64(self):
        layer = self.make(dtype="float64")
        inputs = self.inputs
        if not self.integer:
            inputs = {k: x.astype("float64") for k, x in inputs.items()}
        output = self.call(layer, inputs)
        assert keras.backend.standardize_dtype(output.dtype) == "float64"
        assert np.all(np.isfinite(to_numpy(output)))
        for weight in layer.weights:
            fixed = weight.path.endswith(self.fixed)
            assert weight.dtype == ("float32" if fixed else "float64")
