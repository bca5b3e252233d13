"""Rows of tokens of which some are padding, without it."""

from keras import ops


class ValidFirst:
    """A permutation of each row: what is masked goes to the end.

    Args:
        mask: Boolean `[B, L]`.
    """

    def __init__(self, mask):
        index = ops.arange(ops.shape(mask)[1], dtype="int32")[None, :]
        count = ops.cast(mask, "int32")
        before = ops.cumsum(count, axis=1) - count
        total = ops.sum(count, axis=1, keepdims=True)
        self.mask = mask
        # The place that each token takes, and the token at each place.
        self.place = ops.where(mask, before, total + index - before)
        self.source = ops.cast(ops.argsort(self.place, axis=1), "int32")

    def apply(self, *tensors):
        """Tensors `[B, L, H, width]` with their tokens in this order."""
        return tuple(_permuted(x, self.source, self.place) for x in tensors)

    def undo(self, x):
        """Tokens of `x` in their own order again; 0 where masked."""
        x = _permuted(x, self.place, self.source)
        return ops.where(self.mask[:, :, None, None], x, 0.0)


def _permuted(x, source, place):
    """`x` `[B, L, ...]` with token `source[b, i]` at place i of row b."""

    # The gradient of a gather would be a scatter; of a permutation, it is
    # the inverse permutation.
    @ops.custom_gradient
    def permute(x):
        def gradient(*grads):
            grad = grads[0][0] if isinstance(grads[0], tuple) else grads[0]
            return gather(grad, place)

        return gather(x, source), gradient

    return permute(x)


def gather(x, index):
    """Elements `index` `[B, N]` along the second axis of `x` `[B, L, ...]`."""
    index = ops.reshape(index, (*ops.shape(index), *(1,) * (len(x.shape) - 2)))
    return ops.take_along_axis(x, index, axis=1)
