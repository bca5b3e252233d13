"""Values and gradients of functions of several arrays, on either backend."""

import keras
import numpy as np

ON_JAX = keras.backend.backend() == "jax"

# How a function is run. JAX always compiles it by XLA here: one operation at a
# time it would compile each for each of its shapes.
MODES = ["graph"] if ON_JAX else ["eager", "graph", "dynamic"]
XLA_MODES = ["graph"] if ON_JAX else ["xla", "dynamic xla"]


def differentiate(function, mode="eager"):
    """The value of a function, and gradients of its product with a cotangent.

    Args:
        function: Function from tensors to one tensor.
        mode: "eager", "graph" or "xla"; "dynamic" before it hides the first
            two sizes of every argument from the trace, which then serves all
            sizes.

    Returns:
        Function of `(arrays, cotangent)` that gives a list of float64 NumPy
        arrays: the value, and the gradients in order.
    """
    if ON_JAX:
        return _jax(function)
    return _tensorflow(function, mode)


def _tensorflow(function, mode):
    import tensorflow as tf

    def both(cotangent, *tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
            total = tf.reduce_sum(value * cotangent)
        return [value, *tape.gradient(total, tensors)]

    if mode != "eager":
        both = tf.function(
            both,
            jit_compile="xla" in mode,
            input_signature=_open_signature() if "dynamic" in mode else None,
        )

    def run(arrays, cotangent):
        tensors = [tf.constant(x) for x in arrays]
        cotangent = tf.constant(cotangent, tensors[0].dtype)
        return [x.numpy().astype("float64") for x in both(cotangent, *tensors)]

    return run


def _open_signature():
    import tensorflow as tf

    from tests.ops import sizes

    widths = (sizes.WIDTH, sizes.DIM, sizes.DIM, sizes.WIDTH)
    return [
        tf.TensorSpec([None, None, sizes.HEADS, width], "float32")
        for width in widths
    ]


def _jax(function):
    import jax

    @jax.jit
    def both(cotangent, *tensors):
        value, pullback = jax.vjp(function, *tensors)
        return [value, *pullback(cotangent)]

    def run(arrays, cotangent):
        with jax.enable_x64(arrays[0].dtype == np.float64):
            tensors = [jax.numpy.asarray(x) for x in arrays]
            cotangent = jax.numpy.asarray(cotangent, tensors[0].dtype)
            return [
                np.asarray(x, "float64") for x in both(cotangent, *tensors)
            ]

    return run
