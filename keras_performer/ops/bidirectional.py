"""Bidirectional attention by chunks: layout, and the gradient around them."""

from keras import ops

from keras_performer.ops import causal
from keras_performer.ops import chunks
from keras_performer.ops.scan import chunk_scan


def summed_attention(
    query, key, values, feature_map, projection, weights, chunk_size
):
    """Every query sees every key through its features.

    Features are computed chunk by chunk, and anew in the gradient: nothing of
    size L x M is stored, and what a chunk needs stays in a cache.

    Args:
        query: `[B, L, H, D]`.
        key: `[B, S, H, D]`.
        values: `[B, S, H, F]`, with the column of ones; 0 where a key is
            masked.
        feature_map: The feature map.
        projection: Tensor or `None`; it gets no gradient.
        weights: Dict of the map's weights.
        chunk_size: Tokens per chunk.

    Returns:
        Output `[B, L, H, E]`.
    """
    names = list(weights)

    @ops.custom_gradient
    def attend(query, key, values, *rest):
        kernel = chunks.SummedChunks(
            feature_map,
            (rest[len(names) :] or (None,))[0],
            dict(zip(names, rest)),
        )
        queries, keys = _Layout(query, chunk_size), _Layout(key, chunk_size)
        query_chunks = (queries.split(query),)
        key_chunks = (keys.split(key), keys.split(values))
        state = causal.empty_state(
            query, values, kernel.bound, kernel.projection
        )
        (sums, shift), _ = chunk_scan(
            kernel.add,
            causal.carry_of(state, query.dtype),
            key_chunks,
            keys.steps,
            0,
        )
        _, (output, normalizer, scale) = chunk_scan(
            lambda carry, x: (carry, kernel.read(*x, sums, shift)),
            (),
            query_chunks,
            queries.steps,
            3,
        )

        def gradient(*grads):
            grad = chunks.normalize_gradient(
                queries.split(grads[0]), output, normalizer, kernel.log_space
            )
            none = tuple(x * 0.0 for x in rest[: len(names)])

            def read(carry, x):
                grad_query, more, grad_sums = kernel.read_gradient(
                    *x, sums, shift
                )
                carry = [a + b for a, b in zip(carry, (grad_sums, *more))]
                return tuple(carry), (grad_query,)

            def add(carry, x):
                grads, more = kernel.add_gradient(x, shift, grad_sums)
                return tuple(a + b for a, b in zip(carry, more)), grads

            (grad_sums, *more), (grad_query,) = chunk_scan(
                read,
                (sums * 0.0, *none),
                (*query_chunks, grad, scale),
                queries.steps,
                1,
            )
            grad_weights, (grad_key, grad_values) = chunk_scan(
                add, tuple(more), key_chunks, keys.steps, 2
            )
            return (
                queries.join(grad_query),
                keys.join(grad_key),
                keys.join(grad_values),
                *grad_weights,
                *(x * 0.0 for x in rest[len(names) :]),
            )

        return queries.join(output), gradient

    rest = (*weights.values(), *(() if projection is None else (projection,)))
    return attend(query, key, values, *rest)


class _Layout:
    """How an axis of tokens is split into chunks."""

    def __init__(self, x, chunk_size):
        self.length = ops.shape(x)[1]
        if isinstance(self.length, int):
            chunk_size = max(1, min(chunk_size, self.length))
        self.size = chunk_size
        steps = -(-self.length // chunk_size)
        self.steps = causal.at_least_one(steps)

    def split(self, x):
        return causal.to_chunks(x, self.steps, self.size)

    def join(self, x):
        return causal.from_chunks(x)[:, : self.length]
