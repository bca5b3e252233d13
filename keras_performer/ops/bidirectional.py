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
        query_chunks = (queries.split_repeating(query),)
        key_chunks = (keys.split_repeating(key), keys.split(values))
        state = causal.empty_state(
            query, values, kernel.bound, kernel.projection
        )
        (sums, shift), _ = chunk_scan(
            kernel.add,
            causal.carry_of(state, query.dtype),
            key_chunks,
            keys.steps,
            (),
            after=key,
        )
        *size, _ = ops.shape(query_chunks[0])[1:]  # B, H, C
        _, (output, normalizer, scale) = chunk_scan(
            lambda carry, x: (carry, kernel.read(*x, sums, shift)),
            (),
            query_chunks,
            queries.steps,
            ((*size, values.shape[-1] - 1), (*size, 1), (*size, 1)),
            after=sums,
        )

        def gradient(*grads):
            grad = chunks.normalize_gradient(
                queries.split(grads[0]), output, normalizer, kernel.log_space
            )
            grad_query, grad_key, grad_values, grad_weights = _two_passes(
                kernel,
                (*query_chunks, grad, scale),
                key_chunks,
                (sums, shift),
                (queries.steps, keys.steps),
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


def _two_passes(kernel, query_chunks, key_chunks, carry, steps):
    """Gradients of queries, keys, values and weights, by computing anew.

    Args:
        kernel: `chunks.SummedChunks`.
        query_chunks: Chunks of the queries, of the gradient of the output
            before its normalisation, and of the scale of its rows.
        key_chunks: Chunks of the keys and of the values.
        carry: Sums of all keys, and their shift.
        steps: Numbers of chunks of queries and of keys.
    """
    sums, shift = carry

    def read(carry, x):
        grad_query, grad_weights, grad_sums = kernel.read_gradient(
            *x, sums, shift
        )
        gradients = (grad_sums, *grad_weights)
        return tuple(a + b for a, b in zip(carry, gradients)), (grad_query,)

    zeros = tuple(x * 0.0 for x in (sums, *kernel.bound.weights.values()))
    (grad_sums, *grad_weights), (grad_query,) = chunk_scan(
        read,
        zeros,
        query_chunks,
        steps[0],
        (ops.shape(query_chunks[0])[1:],),
        after=query_chunks[1],
    )

    def add(carry, x):
        gradients, grad_weights = kernel.add_gradient(x, shift, grad_sums)
        return tuple(a + b for a, b in zip(carry, grad_weights)), gradients

    grad_weights, (grad_key, grad_values) = chunk_scan(
        add,
        tuple(grad_weights),
        key_chunks,
        steps[1],
        tuple(ops.shape(x)[1:] for x in key_chunks),
        after=grad_sums,
    )
    return grad_query, grad_key, grad_values, grad_weights


class _Layout:
    """How an axis of tokens is split into chunks."""

    def __init__(self, x, chunk_size):
        self.length = ops.shape(x)[1]
        self.size = causal.at_least_one(
            min(chunk_size, self.length)
            if isinstance(self.length, int)
            else ops.minimum(chunk_size, self.length)
        )
        steps = -(-self.length // self.size)
        self.steps = causal.at_least_one(steps)

    def split(self, x):
        return causal.to_chunks(x, self.steps, self.size)

    def split_repeating(self, x):
        return self.split(causal.repeat_last(x, self.steps * self.size))

    def join(self, x):
        return causal.from_chunks(x)[:, : self.length]
