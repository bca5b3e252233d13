"""Embeddings of tokens and of their positions."""

import keras
import numpy as np
from keras import ops

from keras_performer import arguments
from keras_performer.layers.masks import boolean_mask
from keras_performer.layers.steps import parts_scope

# The longest wavelength of sine and rotary positions, in tokens over 2 pi:
# Section 3.5 of https://arxiv.org/abs/1706.03762.
MAX_WAVELENGTH = 10_000.0
# Positions below are exact multiples of a frequency; see `_angles`.
POSITION_SPLIT = 1024
# Rows of the finer of the two tables of `_cos_sin`.
POSITION_ROW = 128


def rotary_embedding(x, positions=None):
    """Rotates pairs of entries by an angle that grows with the position.

    The product of a rotated query and a rotated key depends on their
    distance alone, and norms stay as they are: features of rotated vectors
    still estimate the kernel of the rotated product. Entry i is paired with
    entry `i + D / 2`.

    Args:
        x: Queries or keys of shape `(B, L, H, D)`, D even.
        positions: Integers `(B, L)`; `None` for 0 to L - 1.

    Returns:
        Tensor of the shape and dtype of `x`; the rotation is computed in
        float32 (float64 for float64).

    Reference:

    - [Su et al., 2021](https://arxiv.org/abs/2104.09864)
    """
    given = keras.backend.standardize_dtype(x.dtype)
    dtype = "float64" if given == "float64" else "float32"
    half = x.shape[-1] // 2
    # [L, D/2] or [B, L, D/2]
    if positions is None and x.shape[1] is not None:
        cos, sin = _cos_sin(x.shape[1], half, _zero(x, dtype))
    else:
        if positions is None:
            positions = ops.arange(ops.shape(x)[1], dtype="int32")
        angle = _angles(positions, half, dtype)
        cos, sin = ops.cos(angle), ops.sin(angle)
    cos, sin = cos[..., None, :], sin[..., None, :]
    x = ops.cast(x, dtype)
    first, second = x[..., :half], x[..., half:]
    rotated = ops.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return ops.cast(rotated, given)


def _cos_sin(length, count, zero):
    """Cosines and sines of `_angles` of 0 to `length` - 1: `[length, count]`.

    By the angles' sum, from two small tables: computed by `ops.cos` they cost
    some per cent of a training step on a CPU.
    """
    frequency = _frequencies(count)
    rows = -(-length // POSITION_ROW)
    coarse = np.arange(rows)[:, None, None] * POSITION_ROW * frequency
    fine = np.arange(POSITION_ROW)[:, None] * frequency
    cos_a, sin_a, cos_b, sin_b = (
        ops.cast(function(angle), zero.dtype)
        for angle in (coarse, fine)
        for function in (np.cos, np.sin)
    )
    cos_b, sin_b = cos_b + zero, sin_b + zero
    tables = (
        cos_a * cos_b - sin_a * sin_b,
        sin_a * cos_b + cos_a * sin_b,
    )
    return [
        ops.reshape(table, (rows * POSITION_ROW, count))[:length, :]
        for table in tables
    ]


def _zero(x, dtype):
    """0, which TensorFlow does not know when it hands a program to XLA.

    TensorFlow folds what depends on constants alone into one constant of up
    to 10 MB before it hands a program to XLA: tables of all positions, a
    dozen of them in each layer's step. XLA itself sees the zero.
    """
    entry = ops.sum(ops.cast(x[:1, :1, 0, 0] > 0, "int32"))
    return ops.cast(0 * entry, dtype)


def state_positions(first, tokens, mask=None):
    """Positions `[B, L]` of tokens `[B, L, ...]` that continue a sequence.

    A masked token takes no position; it is given the first.

    Args:
        first: The position of the first token, `[B]` or one for all rows.
        tokens: Tensor whose first two sizes are B and L.
        mask: Boolean tensor `[B, L]`, or `None`.
    """
    batch, length = ops.shape(tokens)[:2]
    count = ops.ones((batch, length), dtype="int32")
    if mask is not None:
        count = ops.cast(mask, "int32")
    before = ops.cumsum(count, axis=1) - count
    positions = before + ops.reshape(ops.cast(first, "int32"), (-1, 1))
    # Not the next one's, which may be beyond a table that is full.
    return positions * count


def _frequencies(count):
    return MAX_WAVELENGTH ** -(np.arange(count) / count)


def _angles(positions, count, dtype):
    """Position times frequency modulo 2 pi, about: `[..., count]`.

    A float32 holds 24 bits: a million times a frequency would be wrong by
    0.06. Positions are split, so that the error stays below 1e-3 up to there
    and grows with the thousands only.
    """
    frequency = _frequencies(count)
    turn = np.remainder(POSITION_SPLIT * frequency, 2 * np.pi)
    whole = ops.cast(positions // POSITION_SPLIT, dtype)[..., None]
    rest = ops.cast(positions % POSITION_SPLIT, dtype)[..., None]
    frequency, turn = (ops.cast(x, dtype) for x in (frequency, turn))
    return rest * frequency + whole * turn


@keras.saving.register_keras_serializable(package="keras_performer")
class TokenAndPositionEmbedding(keras.layers.Layer):
    """Sum of a token's embedding and of its position's.

    Called with `reverse=True` it multiplies by the transposed token
    embedding instead: a language model's head that shares its weight.

    Args:
        vocabulary_size: Number of tokens, V.
        sequence_length: Longest sequence, for learned positions.
        embedding_dim: Width of the embedding.
        position: "learned" (one vector for each position), "sine" (fixed,
            for any length; tokens are then multiplied by
            `sqrt(embedding_dim)`, as in the paper), or `None`, where
            attention knows of positions itself (`rotary=True`) or needs
            none.
        mask_zero: Whether token 0 is padding. The output then carries the
            mask of all other tokens, and of a mask of the input those that
            both keep.
        reverse_dtype: Dtype of the logits and of the product that gives
            them; `None` for the compute dtype. bfloat16 has about three
            digits: the likeliest tokens tie in it.
        grid: Sizes of axes, such as `(rows, columns, channels)` of images in
            raster order, whose product is `sequence_length`: a learned
            position is then the sum of one vector for each axis. `None` for
            a vector for each position.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: Integer tokens of shape `(B, L)`; with `reverse`, a tensor of
            shape `(B, L, embedding_dim)`.
        reverse: Whether to give logits.
        positions: Integers `(B, L)`, the positions of the tokens; `None` for
            0 to L - 1.

    Returns:
        Tensor of shape `(B, L, embedding_dim)` in the compute dtype, or
        logits `(B, L, V)` in `reverse_dtype`.

    Raises:
        ValueError: If an argument has a wrong value, or a sequence is longer
            than the learned positions. In a function that was traced for any
            length, and where `positions` say so, those beyond are NaN
            instead.
        TypeError: If `mask_zero` is no boolean.

    Reference:

    - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    def __init__(
        self,
        vocabulary_size,
        sequence_length,
        embedding_dim,
        position="learned",
        mask_zero=False,
        reverse_dtype=None,
        grid=None,
        **kwargs,
    ):
        arguments.check_integer("vocabulary_size", vocabulary_size)
        arguments.check_integer("sequence_length", sequence_length)
        arguments.check_integer("embedding_dim", embedding_dim)
        arguments.check_choice("position", position, ("learned", "sine", None))
        arguments.check_boolean("mask_zero", mask_zero)
        if position == "sine" and embedding_dim % 2:
            raise arguments.invalid(
                "embedding_dim",
                'an even number with position="sine"',
                embedding_dim,
            )
        grid = _check_grid(grid, sequence_length, position)
        # Tokens may come as floats; low precision would change them.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.vocabulary_size = vocabulary_size
        self.sequence_length = sequence_length
        self.embedding_dim = embedding_dim
        self.position = position
        self.grid = grid
        self.mask_zero = mask_zero
        if reverse_dtype is not None:
            reverse_dtype = keras.backend.standardize_dtype(reverse_dtype)
        self.reverse_dtype = reverse_dtype

    def build(self, inputs_shape):
        with parts_scope():
            self.token_embedding = keras.layers.Embedding(
                self.vocabulary_size,
                self.embedding_dim,
                dtype=self.dtype_policy,
                name="token_embedding",
            )
        # This layer hands masks on; Keras would warn that they are dropped.
        self.token_embedding.supports_masking = True
        self.token_embedding.build(inputs_shape)
        if self.position == "learned":
            axes = {"position_embedding": self.sequence_length}
            if self.grid is not None:
                axes = {
                    f"position_embedding_{axis}": size
                    for axis, size in enumerate(self.grid)
                }
            self.position_embeddings = [
                self.add_weight(
                    name=name,
                    shape=(size, self.embedding_dim),
                    initializer="uniform",
                )
                for name, size in axes.items()
            ]

    def call(self, inputs, reverse=False, positions=None):
        self._check_shape(inputs.shape, reverse)
        if reverse:
            table = self.token_embedding.embeddings
            dtype = self.reverse_dtype or self.compute_dtype
            return ops.matmul(
                ops.cast(inputs, dtype), ops.transpose(ops.cast(table, dtype))
            )
        tokens = self.token_embedding(inputs)
        if self.position is None:
            return tokens
        if positions is None:
            positions = ops.arange(ops.shape(inputs)[1], dtype="int32")
        if self.position == "learned":
            vectors = self._learned(positions)
        else:
            angle = _angles(positions, self.embedding_dim // 2, "float32")
            vectors = ops.concatenate(
                [ops.sin(angle), ops.cos(angle)], axis=-1
            )
            tokens = tokens * self.embedding_dim**0.5
        return tokens + ops.cast(vectors, self.compute_dtype)

    def _learned(self, positions):
        """Vectors `[..., embedding_dim]` of positions `[...]`.

        Beyond the table an unknown length gives NaN: a compiled function
        cannot raise, and must not repeat the last position.
        """
        # Not a slice, which would be too short for a longer sequence.
        rest = ops.minimum(positions, self.sequence_length - 1)
        vectors = 0.0
        # The last axis is the one that changes first.
        for table in reversed(self.position_embeddings):
            size = table.shape[0]
            vectors = vectors + ops.take(table, rest % size, axis=0)
            rest = rest // size
        inside = (positions < self.sequence_length)[..., None]
        return ops.where(inside, vectors, float("nan"))

    def _check_shape(self, shape, reverse):
        rank = 3 if reverse else 2
        if len(shape) != rank or (
            reverse and shape[-1] != self.embedding_dim
        ):
            expected = "(batch, length)"
            if reverse:
                expected = f"(batch, length, {self.embedding_dim})"
            raise ValueError(
                f"{self.name} expected an input of shape {expected} with "
                f"reverse={reverse}. Received: inputs.shape={tuple(shape)}"
            )
        learned = self.position == "learned" and not reverse
        if learned and (shape[1] or 0) > self.sequence_length:
            raise ValueError(
                f"{self.name} has learned positions for sequence_length="
                f"{self.sequence_length} tokens. Received: "
                f"inputs.shape={tuple(shape)}"
            )

    def compute_mask(self, inputs, previous_mask=None):
        if not self.mask_zero or len(inputs.shape) == 3:
            return previous_mask
        mask = ops.not_equal(inputs, 0)
        if previous_mask is None:
            return mask
        return ops.logical_and(mask, boolean_mask(previous_mask))

    def compute_output_shape(self, inputs_shape, reverse=False):
        width = self.vocabulary_size if reverse else self.embedding_dim
        return (*inputs_shape[:2], width)

    def compute_output_spec(self, inputs, reverse=False, positions=None):
        self._check_shape(inputs.shape, reverse)
        dtype = self.compute_dtype
        if reverse and self.reverse_dtype:
            dtype = self.reverse_dtype
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape, reverse), dtype=dtype
        )

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "sequence_length": self.sequence_length,
            "embedding_dim": self.embedding_dim,
            "position": self.position,
            "mask_zero": self.mask_zero,
            "reverse_dtype": self.reverse_dtype,
            "grid": self.grid,
        }


def _check_grid(grid, sequence_length, position):
    """A tuple of the sizes of the axes, or `None`."""
    if grid is None:
        return None
    sizes = isinstance(grid, (list, tuple)) and len(grid) > 0
    sizes = sizes and all(type(size) is int and size > 0 for size in grid)
    if position != "learned" or not sizes or np.prod(grid) != sequence_length:
        raise arguments.invalid(
            "grid",
            "None, or with position=\"learned\" positive integers whose "
            f"product is sequence_length={sequence_length}",
            grid,
        )
    return tuple(grid)
