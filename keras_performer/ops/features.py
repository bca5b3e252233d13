"""Random features: functions from vectors to feature vectors.

The input `x` is a query or a key times `key_dim ** -0.25`, so that the
product of two inputs is the usual scaled score. `x` has shape `(..., d)`,
the projection `(rows, d)`, and the features `(..., M)`.
"""

import math

from keras import ops


def positive_log_features(x, projection, antithetic=False):
    """Logarithm of positive features of the softmax kernel exp(x.y).

    Feature i is `M^(-1/2) exp(w_i.x - |x|^2 / 2)`: Lemma 1 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794).

    Args:
        x: Tensor of shape `(..., d)`.
        projection: Tensor of shape `(M, d)`, the rows w_i.
        antithetic: Whether the second half of the rows (of the smaller size
            where M is odd) is the first with the other sign; only the first
            half is then multiplied.

    Returns:
        Tensor of shape `(..., M)`. An entry is at most `|w_i|^2 / 2`,
        whatever `x`, so that its exponential does not overflow float32 for
        `d` up to about 128.
    """
    num_features = projection.shape[0]
    if antithetic:
        projection = projection[: -(-num_features // 2)]
    product = ops.matmul(x, ops.transpose(projection))
    if antithetic:
        mirrored = -product[..., : num_features // 2]
        product = ops.concatenate([product, mirrored], axis=-1)
    half_norm = 0.5 * ops.sum(ops.square(x), axis=-1, keepdims=True)
    return product - half_norm - 0.5 * math.log(num_features)  # [..., M]


def generalized_features(x, projection, activation, epsilon):
    """Features `M^(-1/2) (f(w_i.x) + epsilon)` of a generalised kernel.

    Section 2.2 and Appendix B.3 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794).

    Args:
        x: Tensor of shape `(..., d)`.
        projection: Tensor of shape `(M, d)`, or `None` to use the entries of
            `x` in place of `w_i.x` (then M is d).
        activation: The function f, elementwise.
        epsilon: Float, added to every value of f.

    Returns:
        Tensor of shape `(..., M)`.
    """
    if projection is not None:
        x = ops.matmul(x, ops.transpose(projection))
    return (activation(x) + epsilon) * x.shape[-1] ** -0.5  # [..., M]


def exponential_log_features(x, projection, epsilon):
    """Logarithm of `M^(-1/2) (exp(w_i.x) + epsilon)`.

    Args:
        x: Tensor of shape `(..., d)`.
        projection: Tensor of shape `(M, d)`, or `None` to use the entries of
            `x` in place of `w_i.x` (then M is d).
        epsilon: Float of at least 0.

    Returns:
        Tensor of shape `(..., M)`.
    """
    if projection is not None:
        x = ops.matmul(x, ops.transpose(projection))
    if epsilon > 0:
        x = ops.logaddexp(x, ops.full_like(x, math.log(epsilon)))
    return x - 0.5 * math.log(x.shape[-1])  # [..., M]
