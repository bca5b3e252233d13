"""Masks of keys. True, or any number but 0, means *keep*."""

import keras
import numpy as np
from keras import ops


def differ(a, b):
    """Whether two sizes are known and not equal."""
    return a is not None and b is not None and a != b


def boolean_mask(mask):
    """A mask of any numeric type, array or list, as a boolean tensor."""
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        mask = ops.convert_to_tensor(mask)
    if keras.backend.standardize_dtype(mask.dtype) == "bool":
        return ops.convert_to_tensor(mask)
    return ops.not_equal(mask, 0)


def mask_shape(mask):
    """Shape of a mask in any form, symbolic or a list."""
    return mask.shape if hasattr(mask, "shape") else np.shape(mask)


def combined_key_mask(masks, attention_mask, source):
    """One mask of keys out of all that were given.

    Args:
        masks: List of masks `(B, S)`, in any form, or `None`.
        attention_mask: A mask that is the same for all queries, or `None`.
        source: `(B, S)`, sizes that may be `None`.

    Returns:
        Boolean tensor `(B, S)`, or `None` for no mask.

    Raises:
        ValueError: If a shape does not fit.
    """
    combined = None
    if attention_mask is not None:
        attention_mask = boolean_mask(attention_mask)
        check_factored_mask(attention_mask.shape, source)
        while len(attention_mask.shape) > 2:
            attention_mask = ops.squeeze(attention_mask, axis=1)
    for mask in (*masks, attention_mask):
        if mask is None:
            continue
        mask = boolean_mask(mask)
        check_key_mask(mask.shape, source)
        if combined is None:
            combined = mask
        else:
            combined = ops.logical_and(combined, mask)
    return combined


def check_mask_argument(mask, value):
    """Raises where `mask` is given beside a value of its own."""
    if mask is not None and value is not None:
        raise ValueError(
            "The argument `mask` is for self-attention, with one tensor. "
            "With queries and values, pass `value_mask` (or `key_mask`) for "
            "the keys and `query_mask` for the output."
        )


def check_key_mask(shape, source, name="key_mask"):
    """Raises unless a mask has the shape `(B, length)` of its tokens."""
    if len(shape) != 2 or any(differ(a, b) for a, b in zip(shape, source)):
        raise ValueError(
            f"Received an invalid value for argument `{name}`, expected a "
            f"mask of shape (batch, length) = {tuple(source)}. Received: a "
            f"mask of shape {tuple(shape)}"
        )


def check_factored_mask(shape, source):
    """Raises unless an attention mask is the same for all queries."""
    batch, length = source
    if (
        len(shape) not in (2, 3, 4)
        or any(n != 1 for n in shape[1:-1])
        or differ(shape[0], batch)
        or differ(shape[-1], length)
    ):
        raise ValueError(
            "Linear attention forms no matrix of pairs to mask. Pass a "
            "`key_mask` of shape (batch, key length), or an `attention_mask` "
            "that is the same for all queries, of shape (batch, key length), "
            "(batch, 1, key length) or (batch, 1, 1, key length); set "
            "`causal=True` for a causal mask. Received: attention_mask.shape="
            f"{tuple(shape)} for (batch, key length)={tuple(source)}"
        )
