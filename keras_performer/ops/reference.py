"""Oracles: slow, and obviously right. What every fast path is tested against.

They build the whole matrix of kernel values with one logarithm for each
query, key and feature (`[B, H, L, S, M]`), and normalise its rows. Everything
runs in the dtype that comes in; float64 for tests.
"""

from keras import ops


def kernel_matrix(query, key, feature_map, projection=None):
    """Estimated kernel values of all pairs of queries and keys.

    Args:
        query: Tensor `(B, L, H, D)`, times `D ** -0.25`.
        key: Tensor `(B, S, H, D)`, times `D ** -0.25`.
        feature_map: A `FeatureMap`.
        projection: Tensor handed to the feature map.

    Returns:
        Tensor `(B, H, L, S)`: kernel values, or their logarithms for a map
        in log space.
    """
    query = ops.transpose(query, (0, 2, 1, 3))
    key = ops.transpose(key, (0, 2, 1, 3))
    features_q = feature_map(query, projection, is_query=True)
    features_k = feature_map(key, projection, is_query=False)
    features_q = features_q[:, :, :, None, :]  # [B, H, L, 1, M]
    features_k = features_k[:, :, None, :, :]  # [B, H, 1, S, M]
    if feature_map.log_space:
        return ops.logsumexp(features_q + features_k, axis=-1)
    return ops.sum(features_q * features_k, axis=-1)


def exact_log_kernel(query, key):
    """Logarithm `x.y` of the softmax kernel, `(B, H, L, S)`."""
    return ops.einsum("bihd,bjhd->bhij", query, key)


def attention_matrix(
    query,
    key,
    feature_map,
    projection=None,
    key_mask=None,
    causal=False,
    local_window=0,
):
    """The matrix that the fast functions apply without forming it.

    Args:
        query: Tensor `(B, L, H, D)`, times `D ** -0.25`.
        key: Tensor `(B, S, H, D)`, times `D ** -0.25`.
        feature_map: A `FeatureMap`.
        projection: Tensor handed to the feature map.
        key_mask: Optional boolean mask `(B, S)`.
        causal: Whether query i sees keys `j <= i` only.
        local_window: W: keys of the own and the previous block of W
            positions have their exact kernel value.

    Returns:
        Tensor `(B, H, L, S)`. A row without any key is 0.
    """
    values = kernel_matrix(query, key, feature_map, projection)
    length, source = values.shape[-2:]
    i = ops.arange(length)[:, None]
    j = ops.arange(source)[None, :]
    if local_window:
        near = j // local_window >= i // local_window - 1
        values = ops.where(near, exact_log_kernel(query, key), values)
    seen = ops.ones((1, 1, length, source), dtype="bool")
    if causal:
        seen = ops.logical_and(seen, j <= i)
    if key_mask is not None:
        seen = ops.logical_and(seen, key_mask[:, None, None, :])
    if feature_map.log_space:
        some = ops.any(seen, axis=-1, keepdims=True)
        values = ops.where(seen, values, -float("inf"))
        values = ops.where(some, values, 0.0)
        total = ops.logsumexp(values, axis=-1, keepdims=True)
        return ops.where(some, ops.exp(values - total), 0.0)
    values = ops.where(seen, values, 0.0)
    total = ops.sum(values, axis=-1, keepdims=True)
    some = total != 0
    return ops.where(some, values / ops.where(some, total, 1.0), 0.0)


def attention(query, key, value, feature_map, projection=None, **options):
    """Attention through the whole matrix, `(B, L, H, E)`.

    Args:
        query: Tensor `(B, L, H, D)`, times `D ** -0.25`.
        key: Tensor `(B, S, H, D)`, times `D ** -0.25`.
        value: Tensor `(B, S, H, E)`.
        feature_map: A `FeatureMap`.
        projection: Tensor handed to the feature map.
        **options: `key_mask`, `causal`, `local_window`, as for
            `attention_matrix`.
    """
    matrix = attention_matrix(query, key, feature_map, projection, **options)
    return ops.einsum("bhij,bjhe->bihe", matrix, value)


def attention_by_token(query, key, value, key_mask=None):
    """Causal attention from features, one token at a time.

    The recurrence of prefix sums, literally: Equation 11 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794).

    Args:
        query: Features `(B, L, H, M)`.
        key: Features `(B, L, H, M)`.
        value: Tensor `(B, L, H, E)`.
        key_mask: Optional boolean mask `(B, L)`.

    Returns:
        Tensor `(B, L, H, E)`.
    """
    if key_mask is not None:
        key = key * ops.cast(key_mask, key.dtype)[:, :, None, None]
    sums = ops.zeros_like(key[:, 0, :, :, None] * value[:, 0, :, None, :])
    normalizer = ops.zeros_like(key[:, 0])
    outputs = []
    for t in range(query.shape[1]):
        sums = sums + key[:, t, :, :, None] * value[:, t, :, None, :]
        normalizer = normalizer + key[:, t]
        numerator = ops.einsum("bhm,bhme->bhe", query[:, t], sums)
        total = ops.sum(query[:, t] * normalizer, axis=-1, keepdims=True)
        some = total != 0
        outputs.append(
            ops.where(some, numerator / ops.where(some, total, 1.0), 0.0)
        )
    return ops.stack(outputs, axis=1)
