"""Attention in linear time, by chunks: bidirectional and causal.

Tensors at the door are `[B, L, H, D]`: batch, length, heads, width.
"""

import keras
from keras import ops

from keras_performer import arguments
from keras_performer.ops import bidirectional
from keras_performer.ops import causal as causal_scan
from keras_performer.ops import chunks
from keras_performer.ops import padding

# Tokens per chunk, where nobody asked for another number: long enough for large
# products, short against the C^2 part of a causal chunk, and such that what
# belongs to a chunk stays in a cache.
DEFAULT_CHUNK_SIZE = 128
DEFAULT_BIDIRECTIONAL_CHUNK_SIZE = 256

FLOAT16_MAX = 65504.0
# Blocks of a local window in one step of the loop, which the graph holds one
# by one.
MOST_BLOCKS = 8


class _Given:
    """Stands for a feature map where features, not vectors, come in."""

    log_space = False

    def __call__(self, x, projection=None, is_query=True):
        return x


def linear_attention(q_features, k_features, v, key_mask=None):
    """Bidirectional attention from given features, in linear time.

    Row i of the output is `sum_j (f_i.g_j) v_j / sum_j (f_i.g_j)` over the
    keys j that the mask keeps: Equation 4 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794).

    Args:
        q_features: Features of the queries, shape `(B, L, H, M)`.
        k_features: Features of the keys, shape `(B, S, H, M)`.
        v: Values of shape `(B, S, H, E)`.
        key_mask: Optional mask of shape `(B, S)`; true or nonzero keeps a
            key. A masked key is left out of numerator and denominator.

    Returns:
        Tensor of shape `(B, L, H, E)` and the dtype of `v`, computed in
        float32 (float64 if `v` is float64). A row without any key is 0, as
        is a row whose weights sum to less than 1e-12 in magnitude.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    return kernel_attention(
        q_features, k_features, v, key_mask, feature_map=_Given()
    )


def causal_linear_attention(
    q_features,
    k_features,
    v,
    key_mask=None,
    *,
    chunk_size=None,
    initial_state=None,
    return_state=False,
):
    """Causal attention from given features, in linear time.

    As `linear_attention`, with the sums over the keys `j <= i`. See
    `causal_kernel_attention` for the arguments, the state and the errors;
    that function also computes the features chunk by chunk, so that they are
    never stored.

    Args:
        q_features: Features of the queries, shape `(B, L, H, M)`.
        k_features: Features of the keys, shape `(B, L, H, M)`.
        v: Values of shape `(B, L, H, E)`.
        key_mask: Optional mask of shape `(B, L)`; true keeps a key.
        chunk_size: Tokens per chunk; changes the speed, not the result.
        initial_state: State of all tokens before these.
        return_state: Whether to return the state after these tokens too.

    Returns:
        Tensor of shape `(B, L, H, E)`, or that and the state.

    Raises:
        ValueError: If the shapes or the state do not fit.
    """
    return causal_kernel_attention(
        q_features,
        k_features,
        v,
        key_mask,
        feature_map=_Given(),
        chunk_size=chunk_size,
        initial_state=initial_state,
        return_state=return_state,
    )


def kernel_attention(
    query,
    key,
    value,
    key_mask=None,
    *,
    feature_map,
    projection=None,
    weights=None,
    chunk_size=None,
):
    """Bidirectional attention through a feature map, in linear time.

    The sums of Equation 4 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), one chunk of
    keys after another, and then the queries likewise. Features are computed
    in the chunk and anew in the gradient, so that memory is
    `O((L + S) (D + E) + M E)` for each head.

    The gradient is the package's own: a tensor gets one if it is an argument
    here, not if the feature map holds it.

    Args:
        query: Queries of shape `(B, L, H, D)`, times `D ** -0.25`.
        key: Keys of shape `(B, S, H, D)`, times `D ** -0.25`.
        value: Values of shape `(B, S, H, E)`.
        key_mask: Optional mask of shape `(B, S)`; true or nonzero keeps a
            key. A masked key is left out of numerator and denominator.
        feature_map: A `FeatureMap`, or any function of `(x, projection,
            is_query)` from `(B, H, N, D)` to `(B, H, N, M)` with an attribute
            `log_space`, true if it gives logarithms of positive features.
        projection: Tensor handed to the feature map.
        weights: Dict of tensors handed to the feature map, if it has any.
            Their gradients are summed in the scan.
        chunk_size: Tokens for each step; it changes the speed, never the
            result. `None`: 256.

    Returns:
        Tensor of shape `(B, L, H, E)` and the dtype of `value`, computed in
        float32 (float64 for float64). A row without any key is 0.

    Raises:
        ValueError: If the shapes do not fit together.
        TypeError: If the feature map is none.
    """
    dtype = value.dtype
    _check_shapes(query, key, value, key_mask)
    _check_map(feature_map, projection, query)
    arguments.check_integer("chunk_size", chunk_size, optional=True)
    query, key, values = _prepare(query, key, value, key_mask)
    output = bidirectional.summed_attention(
        query,
        key,
        values,
        feature_map,
        _core_cast(projection, query),
        _cast_all(weights, query),
        chunk_size or DEFAULT_BIDIRECTIONAL_CHUNK_SIZE,
    )
    return _output_cast(output, dtype)


def causal_kernel_attention(
    query,
    key,
    value,
    key_mask=None,
    *,
    feature_map,
    projection=None,
    weights=None,
    local_window=0,
    chunk_size=None,
    initial_state=None,
    return_state=False,
):
    """Causal attention through a feature map, in linear time and memory.

    The prefix sums of Section 2.5.1 and Appendix B.1 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), computed as
    a scan over chunks. Features are computed in the chunk and anew in the
    gradient; memory is `O(L (D + E) + M E)` for each head. As in
    `kernel_attention`, what the feature map holds gets no gradient.

    With a local window W, positions form blocks of W. A query sees its own
    and the previous block through the exact kernel `exp(x.y)` and earlier
    blocks through features, under one normaliser. Up to 2 W tokens that is
    exact softmax attention.

    Args:
        query: Queries of shape `(B, L, H, D)`, times `D ** -0.25`.
        key: Keys of the same shape, times `D ** -0.25`.
        value: Values of shape `(B, L, H, E)`.
        key_mask: Optional mask of shape `(B, L)`; true or nonzero keeps a
            key. A masked key is left out of numerator and denominator; it
            still takes its position on the grid of the local window. Not so
            where a state is given or returned: there a masked token leaves
            the state of its row as it is, the position too, and with a local
            window its output is 0.
        feature_map: A `FeatureMap`; see `kernel_attention`.
        projection: Tensor handed to the feature map.
        weights: Dict of tensors handed to the feature map, if it has any.
            Their gradients are summed in the scan.
        local_window: W, an integer; 0 for none. Needs log features.
        chunk_size: Tokens for each step of the scan; it changes the speed,
            never the result. `None`: 128, or one block with a local window.
            There it is rounded down to whole blocks, from 1 to 8.
        initial_state: State of all tokens before these, as returned for the
            same `local_window`; `None` for none. It is not changed.
        return_state: Whether to return the state after these tokens too.

    Returns:
        Tensor of shape `(B, L, H, E)` and the dtype of `value`, computed in
        float32 (float64 for float64). A row without any key is 0. With
        `return_state` also the state, a flat dict: `"sums"` `(B, H, M, E)`,
        `"normalizer"` `(B, H, M)`, the stabiliser `"shift"` `(B, H, M)` of
        both, and `"position"` `(B,)`, int32, the number of tokens so far
        that were not masked.
        With a local window also `"keys"` `(B, 2 W, H, D)`, `"values"`
        `(B, 2 W, H, E)` and `"valid"` `(B, 2 W)` of the last two blocks.

    Raises:
        ValueError: If the shapes do not fit together, if the lengths of
            queries and keys differ (where they are not known before, the
            backend's own error says so), if the state is one of other sizes
            or of another local window, or if a local window is asked of a
            map that does not allow it.
        TypeError: If the feature map is none.

    In float32, a sum of weights is exact as long as a row's largest product
    of features is above `exp(-161)` of the product of the largest feature of
    the query and the largest of the key, its gradient above `exp(-101)`.
    Inputs up to `N(0, 4^2)` are far from there; at `N(0, 8^2)` about one row
    in 4,000 that sees a single key passes the second bound (its gradient is
    too small), and none with a local window.
    """
    dtype = value.dtype
    _check_shapes(query, key, value, key_mask)
    _check_map(feature_map, projection, query)
    _check_causal(query, key, feature_map, local_window, chunk_size)
    query, key, values = _prepare(query, key, value, key_mask)
    # Lengths that were not known before differ here, if they do.
    batch, length = ops.shape(query)[:2]
    key = ops.reshape(key, (batch, length, *key.shape[2:]))
    values = ops.reshape(values, (batch, length, *values.shape[2:]))
    projection = _core_cast(projection, query)
    weights = _cast_all(weights, query)
    output, state = _causal_scan(
        (query, key, values, feature_map, projection, weights),
        key_mask,
        local_window,
        chunk_size,
        initial_state,
        return_state,
    )
    output = _output_cast(output, dtype)
    return (output, state) if return_state else output


def initial_state(
    query,
    value,
    *,
    feature_map,
    projection=None,
    weights=None,
    local_window=0,
):
    """The state of no tokens, for `causal_kernel_attention`.

    Args:
        query: Queries of shape `(B, L, H, D)`, for their sizes and dtype.
        value: Values of shape `(B, L, H, E)`, for their sizes.
        feature_map: A `FeatureMap`; see `kernel_attention`.
        projection: Tensor handed to the feature map.
        weights: Dict of tensors handed to the feature map, if it has any.
        local_window: W, an integer; 0 for none.

    Returns:
        A flat dict of tensors; see `causal_kernel_attention`.

    Raises:
        ValueError: If the shapes do not fit together, or if a local window
            is asked of a map that does not allow it.
        TypeError: If the feature map is none.
    """
    _check_shapes(query, query, value, None)
    _check_map(feature_map, projection, query)
    _check_causal(query, query, feature_map, local_window, None)
    query, _, values = _prepare(query, query, value, None)
    bound = chunks.BoundMap(feature_map, _cast_all(weights, query))
    projection = _core_cast(projection, query)
    return causal_scan.empty_state(
        query, values, bound, projection, local_window
    )


def _causal_scan(
    inputs, key_mask, local_window, chunk_size, state, return_state
):
    """The scan that fits the window; checks a state that is given."""
    query, key, values, feature_map, projection, weights = inputs
    if state is not None:
        empty = causal_scan.empty_state(
            query,
            values,
            chunks.BoundMap(feature_map, weights),
            projection,
            local_window,
        )
        _check_state(state, empty)
    lengths = ops.cast(ops.shape(query)[1], "int32")
    order = None
    if key_mask is not None and (state is not None or return_state):
        mask = ops.cast(key_mask, "bool")
        lengths = ops.sum(ops.cast(mask, "int32"), axis=1)  # [B]
        if local_window:
            order = padding.ValidFirst(mask)
            inputs = (*order.apply(query, key, values), *inputs[3:])
    if not local_window:
        return causal_scan.chunked_attention(
            *inputs,
            chunk_size=chunk_size or DEFAULT_CHUNK_SIZE,
            state=state,
            lengths=lengths,
        )
    output, state = causal_scan.local_attention(
        *inputs,
        window=local_window,
        blocks_per_step=min(
            max(1, (chunk_size or 1) // local_window), MOST_BLOCKS
        ),
        state=state,
        return_state=return_state,
        lengths=lengths,
    )
    return output if order is None else order.undo(output), state


def exact_attention(query, key, value, key_mask=None, causal=False):
    """Softmax attention, quadratic in the length.

    Through `keras.ops.dot_product_attention`, except that a row without any
    valid key gives 0.

    Args:
        query: Queries of shape `(B, L, H, D)`, not scaled.
        key: Keys of shape `(B, S, H, D)`.
        value: Values of shape `(B, S, H, E)`.
        key_mask: Optional mask of shape `(B, S)`; true or nonzero keeps a
            key.
        causal: Whether query i sees keys `j <= i` only; needs `L == S`.

    Returns:
        Tensor of shape `(B, L, H, E)` and the dtype of `value`.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    _check_shapes(query, key, value, key_mask)
    if causal:
        _check_equal_lengths(query, key)
    seen = _seen(query, key_mask, causal)  # [B or 1, 1, L, S]
    if key_mask is None:
        return _dot_product_attention(query, key, value, seen)
    keep = ops.cast(key_mask, "bool")[:, :, None, None]
    # Selected, not only masked: a masked value may be infinite.
    output = _dot_product_attention(
        query,
        ops.where(keep, key, ops.zeros_like(key)),
        ops.where(keep, value, ops.zeros_like(value)),
        seen,
    )
    some = ops.transpose(ops.any(seen, axis=-1, keepdims=True), (0, 2, 1, 3))
    return ops.where(some, output, ops.zeros_like(output))


def _dot_product_attention(query, key, value, mask):
    dim, width = query.shape[-1], value.shape[-1]
    scale = dim**-0.5
    if keras.backend.standardize_dtype(value.dtype) == "float64":
        # Keras computes the softmax in float32.
        scores = ops.einsum("bihd,bjhd->bhij", query * scale, key)
        weights = _masked_softmax(scores, mask)
        return ops.einsum("bhij,bjhe->bihe", weights, value)
    if dim == width:
        return ops.dot_product_attention(
            query, key, value, mask=mask, scale=scale
        )
    # JAX wants one width. Zeros change no product and no output.
    common = max(dim, width)
    query, key, value = (
        ops.pad(x, [(0, 0)] * 3 + [(0, common - x.shape[-1])])
        for x in (query, key, value)
    )
    output = ops.dot_product_attention(
        query, key, value, mask=mask, scale=scale
    )
    return output[..., :width]


def attention_scores(
    query,
    key,
    key_mask=None,
    *,
    feature_map=None,
    projection=None,
    weights=None,
    causal=False,
    local_window=0,
):
    """The matrix that the attention functions apply without forming it.

    For looking and for tests: it costs O(L S) memory.

    Args:
        query: Queries of shape `(B, L, H, D)`, times `D ** -0.25`.
        key: Keys of shape `(B, S, H, D)`, times `D ** -0.25`.
        key_mask: Optional mask of shape `(B, S)`; true or nonzero keeps a
            key.
        feature_map: A `FeatureMap`, or `None` for the exact kernel.
        projection: Tensor handed to the feature map.
        weights: Dict of tensors handed to the feature map, if it has any.
        causal: Whether query i sees keys `j <= i` only; needs `L == S`.
        local_window: W as in `causal_kernel_attention`, with `causal`.

    Returns:
        Tensor of shape `(B, H, L, S)`, float32 (float64 for float64). Each
        row sums to 1, or is 0 where there is no key.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    _check_shapes(query, key, key, key_mask)
    if feature_map is not None:
        _check_map(feature_map, projection, query)
        _check_window(feature_map, local_window)
    if local_window and not causal:
        raise arguments.invalid(
            "local_window", "0 with causal=False", local_window
        )
    if causal:
        _check_equal_lengths(query, key)
    query, key, _ = _prepare(query, key, key, key_mask)
    projection = _core_cast(projection, query)
    seen = _seen(query, key_mask, causal)
    query = ops.transpose(query, (0, 2, 1, 3))  # [B, H, L, D]
    key = ops.transpose(key, (0, 2, 1, 3))  # [B, H, S, D]
    exact = ops.einsum("bhid,bhjd->bhij", query, key)
    if feature_map is None:
        return _masked_softmax(exact, seen)
    feature_map = chunks.BoundMap(feature_map, _cast_all(weights, query))
    features_q = feature_map(query, projection, is_query=True)
    features_k = feature_map(key, projection, is_query=False)
    if not feature_map.log_space:
        weights = ops.einsum("bhim,bhjm->bhij", features_q, features_k)
        if seen is not None:
            weights = ops.where(seen, weights, 0.0)
        return _divided_by_sum(weights, chunks.PLAIN_FLOOR)
    max_q = chunks.largest(features_q, axis=-1)  # [B, H, L, 1]
    max_k = chunks.largest(features_k, axis=-1)  # [B, H, S, 1]
    products = ops.einsum(
        "bhim,bhjm->bhij",
        ops.exp(features_q - max_q + chunks.HEADROOM),
        ops.exp(features_k - max_k + chunks.HEADROOM),
    )
    scores = ops.log(ops.maximum(products, 1e-37)) - 2 * chunks.HEADROOM
    scores = scores + max_q + ops.swapaxes(max_k, -1, -2)
    if local_window:
        block = ops.arange(ops.shape(query)[2]) // local_window
        near = block[None, :] >= block[:, None] - 1
        scores = ops.where(near, exact, scores)
    return _masked_softmax(scores, seen)


def _masked_softmax(scores, seen):
    if seen is not None:
        scores = ops.where(seen, scores, chunks.LOG_ZERO)
    # The maximum cancels, so it needs no gradient.
    largest = ops.stop_gradient(chunks.largest(scores, axis=-1))
    weights = ops.exp(scores - largest)
    if seen is not None:
        weights = ops.where(seen, weights, 0.0)
    return _divided_by_sum(weights, chunks.LOG_FLOOR)


def _divided_by_sum(weights, floor):
    total = ops.sum(weights, axis=-1, keepdims=True)
    weights = ops.concatenate([weights, total], axis=-1)
    return chunks.normalize(weights, floor)[0]


def _seen(query, key_mask, causal):
    """Which keys each query sees, `[B or 1, 1, L, S]`; `None` for all."""
    seen = None
    if causal:
        index = ops.arange(ops.shape(query)[1])
        seen = (index[:, None] >= index[None, :])[None, None]
    if key_mask is not None:
        mask = ops.cast(key_mask, "bool")[:, None, None, :]
        if seen is None:
            index = ops.zeros((1, 1, ops.shape(query)[1], 1), dtype="bool")
            return ops.logical_or(index, mask)
        seen = ops.logical_and(seen, mask)
    return seen


def _prepare(query, key, value, key_mask):
    """Query, key, and values with the column of ones, in the core dtype.

    Masked keys and values become 0, so that whatever stood there (NaN
    included) reaches neither the output nor a gradient.
    """
    given = keras.backend.standardize_dtype(value.dtype)
    dtype = "float64" if given == "float64" else "float32"
    query, key, value = (ops.cast(x, dtype) for x in (query, key, value))
    values = chunks.add_ones(value)
    if key_mask is None:
        return query, key, values
    keep = ops.cast(key_mask, "bool")[:, :, None, None]
    key = ops.where(keep, key, ops.zeros_like(key))
    values = ops.where(keep, values, ops.zeros_like(values))
    return query, key, values


def _output_cast(output, dtype):
    """In the dtype of the values, and finite in it.

    Weights of both signs may sum up to almost nothing, and their quotient be
    beyond float16's range.
    """
    if keras.backend.standardize_dtype(dtype) == "float16":
        output = ops.clip(output, -FLOAT16_MAX, FLOAT16_MAX)
    return ops.cast(output, dtype)


def _core_cast(projection, like):
    if projection is None:
        return None
    return ops.stop_gradient(ops.cast(projection, like.dtype))


def _cast_all(weights, like):
    weights = weights or {}
    return {name: ops.cast(x, like.dtype) for name, x in weights.items()}


def _differ(a, b):
    return a is not None and b is not None and a != b


def _check_shapes(query, key, value, key_mask):
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(
                f"Received an invalid value for argument `{name}`, expected "
                "a tensor of shape (batch, length, heads, width). Received: "
                f"{name}.shape={tuple(shape)}"
            )
    q, k, v = (tuple(shape) for shape in shapes.values())
    if (
        _differ(q[0], k[0])
        or _differ(q[2], k[2])
        or _differ(q[3], k[3])
        or any(_differ(a, b) for a, b in zip(k[:3], v[:3]))
    ):
        raise ValueError(
            "Queries and keys must agree in batch, heads and width, keys and "
            "values in batch, length and heads. Received: "
            f"query.shape={q}, key.shape={k}, value.shape={v}"
        )
    if key_mask is None:
        return
    if not hasattr(key_mask, "shape"):
        raise TypeError(
            "Received an invalid value for argument `key_mask`, expected a "
            f"tensor or an array. Received: a {type(key_mask).__name__}"
        )
    mask = tuple(key_mask.shape)
    if len(mask) != 2 or any(_differ(a, b) for a, b in zip(mask, k[:2])):
        raise ValueError(
            "Received an invalid value for argument `key_mask`, expected "
            "shape (batch, key length). Received: "
            f"key_mask.shape={mask} for key.shape={k}"
        )


def _check_state(state, empty):
    """Raises unless a state has the parts and sizes of the empty one."""
    names = type(state).__name__
    if isinstance(state, dict):
        names = sorted(state)
    if names != sorted(empty):
        raise ValueError(
            "Received an invalid value for argument `initial_state`, expected "
            f"a dict of {sorted(empty)}, as returned for the same "
            f"`local_window`. Received: {names}"
        )
    for name, like in empty.items():
        shape, expected = tuple(state[name].shape), tuple(like.shape)
        if len(shape) != len(expected) or any(
            _differ(a, b) for a, b in zip(shape, expected)
        ):
            raise ValueError(
                "Received an invalid value for argument `initial_state`, "
                f"expected `{name}` of shape {expected}, as returned for the "
                "same sizes and `local_window`. Received: "
                f"{name}.shape={shape}"
            )


def _check_equal_lengths(query, key):
    if _differ(query.shape[1], key.shape[1]):
        raise ValueError(
            "Causal attention needs queries and keys of equal length, as "
            "query i sees keys j <= i. Received: query length "
            f"{query.shape[1]} and key length {key.shape[1]}"
        )


def _check_causal(query, key, feature_map, local_window, chunk_size):
    arguments.check_integer("local_window", local_window, least=0)
    arguments.check_integer("chunk_size", chunk_size, optional=True)
    _check_equal_lengths(query, key)
    _check_window(feature_map, local_window)


def _check_window(feature_map, local_window):
    if local_window and not getattr(feature_map, "allows_window", False):
        raise arguments.invalid(
            "local_window",
            "0 for a feature map that does not give logarithms of features "
            "of the softmax kernel",
            local_window,
        )


def _check_map(feature_map, projection, query):
    if not callable(feature_map) or not hasattr(feature_map, "log_space"):
        raise TypeError(
            "Received an invalid value for argument `feature_map`, expected "
            "a FeatureMap (see `keras_performer.feature_maps.get`). "
            f"Received: feature_map={feature_map!r}"
        )
    shape = getattr(feature_map, "projection_shape", lambda *_: None)
    if projection is None and shape(2, query.shape[-1]) is not None:
        raise ValueError(
            "Received an invalid value for argument `projection`, expected "
            f"what {type(feature_map).__name__}.draw_projection gives. "
            "Received: projection=None"
        )
