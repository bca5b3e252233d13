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
    product = _products(x, projection, antithetic)
    half_norm = 0.5 * ops.sum(ops.square(x), axis=-1, keepdims=True)
    return product - half_norm - 0.5 * math.log(projection.shape[0])


def optimal_positive_log_features(x, projection, a, antithetic=False):
    """Logarithm of the positive features of FAVOR++.

    Feature i is `M^(-1/2) (1 - 4 A)^(d/4) exp(A |w_i|^2 + sqrt(1 - 4 A) w_i.x
    - |x|^2 / 2)`: "optimal positive random features", Section 3.2 of
    [Likhosherstov et al., 2022](https://arxiv.org/abs/2205.15317). The kernel
    estimate is unbiased for every A below 1/8.

    Args:
        x: Tensor of shape `(..., d)`.
        projection: Tensor of shape `(M, d)`, the rows w_i.
        a: A, a number or a tensor that broadcasts with `(..., 1)`; 0 gives
            `positive_log_features`.
        antithetic: As for `positive_log_features`.

    Returns:
        Tensor of shape `(..., M)`.
    """
    num_features, dim = projection.shape
    spread = 1.0 - 4.0 * a
    product = _products(x * ops.sqrt(spread), projection, antithetic)
    half_norm = 0.5 * ops.sum(ops.square(x), axis=-1, keepdims=True)
    constant = 0.25 * dim * ops.log(spread) - 0.5 * math.log(num_features)
    row_norms = ops.sum(ops.square(projection), axis=-1)  # [M]
    return product + a * row_norms + (constant - half_norm)


def optimal_a(phi, dim):
    """The A of FAVOR++ of least variance, for inputs of this size.

    Section 3.2 of [Likhosherstov et al.,
    2022](https://arxiv.org/abs/2205.15317), in closed form.

    Args:
        phi: Number or tensor: the mean of `|x + y|^2` over pairs of queries
            x and keys y.
        dim: d, the width of x and y.

    Returns:
        A, at most 0: like `phi`.
    """
    p = phi / dim
    root = ops.sqrt(ops.square(2.0 * p + 1.0) + 8.0 * p)
    return (1.0 - 2.0 * p - root) / 16.0


def trigonometric_features(x, projection):
    """Features `exp(|x|^2 / 2)` times the cosines and sines of `w_i.x`.

    The product of two has expectation `exp(x.y)`, but single features have
    both signs: Section 2.3 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794).

    Args:
        x: Tensor of shape `(..., d)`.
        projection: Tensor of shape `(M / 2, d)`.

    Returns:
        Tensor of shape `(..., M)`. The exponent is cut off at 35, so that
        sums of millions of products do not overflow float32.
    """
    product = ops.matmul(x, ops.transpose(projection))
    half_norm = 0.5 * ops.sum(ops.square(x), axis=-1, keepdims=True)
    size = ops.exp(ops.minimum(half_norm, 35.0)) * projection.shape[0] ** -0.5
    waves = ops.concatenate([ops.cos(product), ops.sin(product)], axis=-1)
    return waves * size  # [..., M]


def softmax_log_features(x, kernel):
    """Logarithm of learned features: softmax of `s W x` and of `-s W x`.

    [Zhang et al., 2024](https://arxiv.org/abs/2402.04347), Section 4.1
    (Hedgehog). With `s = sqrt(d)` and both multiplied by `sqrt(M / 4)`, the
    product of two is `1 + x.y`, as `exp(x.y)` to first order, where W is the
    identity or its columns are unit vectors of all directions. (Without s it
    would be `1 + x.y / d`, too flat a kernel to learn a recall from.)

    Args:
        x: Tensor of shape `(..., d)`.
        kernel: W, transposed: a tensor of shape `(..., d, M / 2)`.

    Returns:
        Tensor of shape `(..., M)`.
    """
    product = ops.matmul(x * x.shape[-1] ** 0.5, kernel)  # [..., M / 2]
    both = [ops.log_softmax(product), ops.log_softmax(-product)]
    constant = 0.5 * math.log(kernel.shape[-1] / 2)
    return ops.concatenate(both, axis=-1) + constant  # [..., M]


def _products(x, projection, antithetic):
    """`w_i.x`, multiplying only the first half of antithetic rows."""
    num_features = projection.shape[0]
    if antithetic:
        projection = projection[: -(-num_features // 2)]
    product = ops.matmul(x, ops.transpose(projection))
    if antithetic:
        mirrored = -product[..., : num_features // 2]
        product = ops.concatenate([product, mirrored], axis=-1)
    return product  # [..., M]


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
