"""Random projections for random features."""

import keras
from keras import ops

from keras_performer import arguments


def orthogonal_gaussian(num_features, dim, seed=None):
    """Gaussian rows that are orthogonal within each block of `dim` rows.

    Every row is a Gaussian vector by itself (its direction is uniform on the
    sphere, its norm an independent chi variable with `dim` degrees of
    freedom), so that a mean over rows has the expectation of a mean over
    independent rows, and a smaller variance: Section 2.4 of
    [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794).

    The orthogonal factor of a QR decomposition alone is not uniformly
    distributed: its columns follow the sign convention of the factorisation.
    Here each is multiplied by the sign of the diagonal of R, which makes the
    factor Haar distributed
    ([Mezzadri, 2007](https://arxiv.org/abs/math-ph/0609050)).

    Args:
        num_features: Number of rows, a positive integer. The last block is
            truncated where it is not a multiple of `dim`.
        dim: Length of a row, a positive integer.
        seed: Integer, `keras.random.SeedGenerator`, or `None` for the global
            seed of Keras. The same integer gives the same rows.

    Returns:
        A float32 tensor of shape `(num_features, dim)`.

    Raises:
        ValueError: If `num_features` or `dim` is not a positive integer.
    """
    arguments.check_integer("num_features", num_features)
    arguments.check_integer("dim", dim)
    blocks = -(-num_features // dim)
    # One draw gives the directions and the norms: two draws from one integer
    # seed would repeat the same numbers.
    normal = keras.random.normal(
        (2, blocks, dim, dim), dtype="float32", seed=seed
    )
    q, r = ops.qr(normal[0])  # [blocks, dim, dim]
    sign = ops.where(ops.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    directions = q * sign[:, None, :]
    norms = ops.sqrt(ops.sum(ops.square(normal[1]), axis=-1, keepdims=True))
    # Rows of a Haar matrix are as uniform as its columns.
    rows = ops.reshape(directions * norms, (blocks * dim, dim))
    return rows[:num_features]
