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
    # Rows of a Haar matrix are as uniform as its columns.
    rotations, norms = _rotations_and_norms(num_features, dim, seed)
    rows = ops.reshape(rotations * norms, (-1, dim))
    return rows[:num_features]


def simplex_gaussian(num_features, dim, seed=None):
    """Gaussian rows that point to the corners of a simplex, in blocks.

    As `orthogonal_gaussian`, but the rows of a block of `dim` meet at equal
    *obtuse* angles, of cosine `-1 / (dim - 1)`: the arrangement of smallest
    variance among those that leave norms independent, for positive features
    ([Reid et al., 2023](https://arxiv.org/abs/2301.13856)).

    Args:
        num_features: Number of rows, a positive integer. The last block is
            truncated where it is not a multiple of `dim`.
        dim: Length of a row, an integer of at least 2.
        seed: As for `orthogonal_gaussian`.

    Returns:
        A float32 tensor of shape `(num_features, dim)`.

    Raises:
        ValueError: If `num_features` is not a positive integer or `dim` not
            an integer of at least 2.
    """
    arguments.check_integer("num_features", num_features)
    arguments.check_integer("dim", dim)
    if dim < 2:
        raise arguments.invalid("dim", "an integer of at least 2", dim)
    rotations, norms = _rotations_and_norms(num_features, dim, seed)
    # The corners of a regular simplex, seen from its centre.
    corners = (ops.eye(dim) - 1.0 / dim) * (dim / (dim - 1.0)) ** 0.5
    rows = ops.reshape(ops.matmul(corners, rotations) * norms, (-1, dim))
    return rows[:num_features]


def iid_gaussian(num_features, dim, seed=None):
    """Independent Gaussian rows; arguments as for `orthogonal_gaussian`."""
    arguments.check_integer("num_features", num_features)
    arguments.check_integer("dim", dim)
    return keras.random.normal(
        (num_features, dim), dtype="float32", seed=seed
    )


def _rotations_and_norms(num_features, dim, seed):
    """Haar matrices `[blocks, dim, dim]`; chi variables `[blocks, dim, 1]`."""
    blocks = -(-num_features // dim)
    # One draw gives the directions and the norms: two draws from one integer
    # seed would repeat the same numbers.
    normal = keras.random.normal(
        (2, blocks, dim, dim), dtype="float32", seed=seed
    )
    q, r = ops.qr(normal[0])
    sign = ops.where(ops.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    sign = ops.cast(sign, "float32")  # whatever floatx is
    norms = ops.sqrt(ops.sum(ops.square(normal[1]), axis=-1, keepdims=True))
    return q * sign[:, None, :], norms


class StepSeed(keras.random.SeedGenerator):
    """A seed for one draw: two words that may be tensors, and no state.

    Args:
        words: Integer tensor of shape `(2,)`.
    """

    def __init__(self, words):
        # Not the base class's, which creates a variable.
        self.words = words

    def next(self, ordered=True):
        # As the state of a generator, of which Keras makes what is in range.
        tensorflow = keras.config.backend() == "tensorflow"
        return ops.cast(self.words, "int64" if tensorflow else "uint32")
