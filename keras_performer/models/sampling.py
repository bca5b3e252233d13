"""Draws of tokens from logits."""

import keras
from keras import ops

from keras_performer.ops.projections import StepSeed


def sample(logits, seed, temperature=1.0, top_k=None, top_p=None):
    """Draws one token from each row of logits.

    Args:
        logits: Tensor of shape `(B, V)`.
        seed: Integers of shape `(2,)`, a tensor or a tuple: one draw's own,
            as the seed of a text and the number of the token.
        temperature: Number or scalar tensor, of at least 0, by which logits
            are divided. 0 takes the largest.
        top_k: Integer; only so many of the largest are drawn from. `None`:
            all.
        top_p: Number or scalar tensor in (0, 1]; only the largest are drawn
            from whose probabilities sum up to it, at least one
            ([Holtzman et al., 2020](https://arxiv.org/abs/1904.09751)).
            `None`: all.

    Returns:
        int32 tensor of shape `(B,)`.
    """
    logits = ops.cast(logits, "float32")
    likeliest = ops.argmax(logits, axis=-1)
    # Subtracted first, or a small temperature would leave float32's range.
    logits = logits - ops.max(logits, axis=-1, keepdims=True)
    temperature = ops.cast(temperature, "float32")
    logits = logits / ops.maximum(temperature, 1e-6)
    vocabulary_size = logits.shape[-1]
    if top_k is not None and top_k < vocabulary_size:
        least = ops.top_k(logits, top_k)[0][:, -1:]
        logits = ops.where(logits < least, -float("inf"), logits)
    if top_p is not None:
        ordered = ops.top_k(logits, vocabulary_size)[0]
        probability = ops.softmax(ordered)
        larger = ops.cumsum(probability, axis=-1) - probability
        inside = ops.where(larger < top_p, ordered, float("inf"))
        least = ops.min(inside, axis=-1, keepdims=True)
        logits = ops.where(logits < least, -float("inf"), logits)
    # The largest of logits plus Gumbel noise has the softmax's distribution.
    uniform = keras.random.uniform(
        ops.shape(logits), minval=1e-20, seed=StepSeed(seed)
    )
    drawn = ops.argmax(logits - ops.log(-ops.log(uniform)), axis=-1)
    return ops.cast(ops.where(temperature > 0, drawn, likeliest), "int32")
