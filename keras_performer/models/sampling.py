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
    tokens = None
    if top_k is not None or top_p is not None:
        # From here on in falling order: equal ones are told apart by it.
        vocabulary_size = logits.shape[-1]
        count = min(top_k or vocabulary_size, vocabulary_size)
        logits, tokens = ops.top_k(logits, count)
    if top_p is not None:
        probability = ops.softmax(logits)
        larger = ops.cumsum(probability, axis=-1) - probability
        first = ops.arange(count)[None, :] == 0
        inside = ops.logical_or(larger < top_p, first)
        logits = ops.where(inside, logits, -float("inf"))
    # The largest of logits plus Gumbel noise has the softmax's distribution.
    uniform = keras.random.uniform(
        ops.shape(logits), minval=1e-20, dtype="float32", seed=StepSeed(seed)
    )
    drawn = ops.argmax(logits - ops.log(-ops.log(uniform)), axis=-1)
    if tokens is not None:
        drawn = ops.take_along_axis(tokens, drawn[:, None], axis=-1)[:, 0]
    drawn, likeliest = (ops.cast(x, "int32") for x in (drawn, likeliest))
    return ops.where(temperature > 0, drawn, likeliest)
