"""The one place that knows the backend.

`chunk_scan` runs a step over the leading axis of its inputs with a trip
count that is known when the loop starts; `vjp` differentiates a small
function (a feature map on one chunk) inside such a step. `keras.ops.scan`
and `keras.ops.fori_loop` are not used: on TensorFlow the first loses
elements when its outputs differ from its carry in structure, and neither
has a gradient under XLA.
"""

import dataclasses
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class Previous:
    """An input that lags by one: of element i, element i - 1 of an array.

    On TensorFlow the copy that would hold it never exists; on JAX
    `chunk_scan` makes it.
    """

    array: Any  # (length, ...)
    first: Any  # (...), what element 0 sees

    def __getitem__(self, index):
        """Element `index`, a scalar tensor of TensorFlow."""
        import tensorflow as tf

        before = self.array[tf.maximum(index - 1, 0)]
        return tf.where(index > 0, before, self.first)


def chunk_scan(
    step, carry, xs, length, outputs, after, reverse=False, unroll=1
):
    """Scans `step` over the leading axis of `xs`.

    Args:
        step: Function `(carry, x) -> (carry, y)`; `carry`, `x` and `y` are
            tuples of tensors. The carry keeps its shapes and dtypes.
        carry: Tuple of tensors, the first carry.
        xs: Tuple of tensors `(length, ...)` or of `Previous`.
        length: Number of steps, at least 1: an integer or a scalar integer
            tensor.
        outputs: Shapes of the elements of `y`; they have the dtype of
            `after`.
        after: A tensor that is known no earlier than the inputs. The memory
            of the outputs waits for it; otherwise XLA sets aside that of all
            loops of a model, gradients included, when the model begins.
        reverse: Whether to visit the last element first. Outputs are stored
            at the index of the element that they come from.
        unroll: Steps per iteration of the loop; `length` is a multiple of
            it.

    Returns:
        The last carry, and a tuple of tensors `(length, ...)`, one for each
        element of `y`.
    """
    if keras.backend.backend() == "jax":
        import jax

        xs = tuple(
            jax.numpy.concatenate([x.first[None], x.array[:-1]])
            if isinstance(x, Previous)
            else x
            for x in xs
        )
        return jax.lax.scan(
            step, carry, xs, reverse=reverse, unroll=min(unroll, length)
        )
    return _tensorflow_chunk_scan(
        step, carry, xs, length, outputs, after, reverse, unroll
    )


def _tensorflow_chunk_scan(
    step, carry, xs, length, outputs, after, reverse, unroll
):
    import tensorflow as tf

    shapes = [x.shape for x in carry]
    # A sum, as there may be no element.
    first = after[(slice(1),) * len(after.shape)]
    zero = tf.reduce_sum(first) * 0.0
    arrays = tuple(
        tf.TensorArray(after.dtype, size=length).unstack(
            tf.fill((length, *shape), zero)
        )
        for shape in outputs
    )
    trips = length // unroll

    def body(trip, carry, arrays):
        for offset in range(unroll):
            index = trip * unroll + offset
            if reverse:
                index = length - 1 - index
            carry, y = step(carry, tuple(x[index] for x in xs))
            arrays = tuple(a.write(index, o) for a, o in zip(arrays, y))
        # A dynamic batch loses static sizes on the way through the body; a
        # while loop insists on getting back the shapes it gave.
        for x, shape in zip(carry, shapes):
            x.set_shape(shape)
        return trip + 1, carry, arrays

    _, carry, arrays = tf.while_loop(
        lambda trip, *_: trip < trips,
        body,
        (tf.constant(0), carry, arrays),
        parallel_iterations=1,
        maximum_iterations=trips,
    )
    return carry, tuple(a.stack() for a in arrays)


def vjp(function, inputs):
    """Value of `function` at `inputs`, and its derivative's transpose there.

    Args:
        function: Function from tensors to one tensor.
        inputs: Tuple of tensors, its arguments.

    Returns:
        `function(*inputs)`, and a function that takes a tensor of that shape
        to the tuple of gradients with respect to the inputs, each of the
        shape of its input.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.vjp(function, *inputs)
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        value = function(*inputs)

    def pullback(cotangent):
        return tape.gradient(
            value,
            inputs,
            output_gradients=cotangent,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    return value, pullback
