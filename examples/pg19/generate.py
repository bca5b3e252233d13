"""Continues a text by a trained model, and shows each token at once.

    python -m examples.pg19.generate --prompt="The value of "
    python -m examples.pg19.generate --model=runs/pg19-small/best.keras

The model is the `.keras` file of a training run; its `config.json` (and
`vocabulary.txt`) must still stand beside it.
"""

import functools
import os

import numpy as np
import tensorflow as tf
from absl import flags

from examples import common
from examples.pg19 import config as configs
from examples.pg19 import evaluate
from keras_performer.models import generation
from keras_performer.models import sample


def stream(
    model,
    tokenizer,
    prompt,
    num_tokens,
    seed=0,
    far_half_life=None,
    **options,
):
    """Yields the continuation of a text in pieces, token by token.

    The cost of a token does not depend on how many there are before it.

    Args:
        model: causal `keras_performer.PerformerLM`, not of "exact" attention.
        tokenizer: the tokenizer of the model.
        prompt: string.
        num_tokens: int, the most tokens to add; 0: without end.
        seed: int, seed of the draws.
        far_half_life: tokens after which what lies beyond the local window
            weighs half as much; None: never.
        **options: `temperature`, `top_k` and `top_p` of
            `keras_performer.models.sample`.

    Yields:
        Strings. A letter of several tokens comes with its last one.
    """

    @functools.partial(tf.function, jit_compile=True)
    def read(ids, state):
        state = model.fade(state, ids.shape[1], far_half_life)
        logits, state = model.step(ids, state)
        return logits[:, -1], state

    @functools.partial(tf.function, jit_compile=True)
    def draw(logits, index):
        return sample(logits, tf.stack([seed, index]), **options)

    ids = np.array([evaluate.prompt_ids(tokenizer, prompt)], "int32")
    state = model.get_initial_state(1)
    # A long prompt fades as it is read.
    size = generation.fading_segment(far_half_life or 1024, 1024)
    parts = [ids[:, i : i + size] for i in range(0, ids.shape[1], size)]
    held, index = [], 0
    while not num_tokens or index < num_tokens:
        for part in parts:
            logits, state = read(tf.constant(part), state)
        token = int(draw(logits, tf.constant(index))[0])
        if token == 0:
            break
        parts = [[[token]]]
        held.append(token)
        text = tokenizer.detokenize(held)
        # The mark of bytes that are no letter yet; four are one for sure.
        if not text.endswith("\ufffd") or len(held) >= 4:
            yield text
            held = []
        index += 1
    yield tokenizer.detokenize(held)


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    strings = {
        "model": (
            "runs/pg19-smoke/best.keras",
            "The .keras file of a training run.",
        ),
        "prompt": ("The value of ", "Text to continue."),
    }
    for name, (default, text) in strings.items():
        flags.DEFINE_string(name, default, text, flag_values=flag_values)
    for name, default, text in (
        ("num_tokens", 1000, "Tokens to add; 0: without end."),
        ("seed", 0, "Of the draws."),
    ):
        flags.DEFINE_integer(
            name, default, text, lower_bound=0, flag_values=flag_values
        )
    flags.DEFINE_float(
        "temperature",
        0.7,
        "0: the likeliest token.",
        lower_bound=0.0,
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "far_half_life",
        None,
        "Tokens after which what lies beyond the local window weighs half as "
        "much; 0: never; none: half the windows of the training.",
        lower_bound=0.0,
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "top_k",
        None,
        "Draw from so many of the likeliest; none: all.",
        lower_bound=1,
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "top_p",
        None,
        "Draw from the likeliest of this probability; none: all.",
        lower_bound=0.0,
        upper_bound=1.0,
        flag_values=flag_values,
    )


def main(options=flags.FLAGS):
    """Runs the command."""
    if options.top_p == 0:
        raise common.UserError("--top_p: expected more than 0. Received: 0")
    model = common.load_model(options.model, "--model")
    folder = os.path.dirname(os.path.abspath(options.model))
    config = common.read_config(configs.Config, folder)
    tokenizer = evaluate.load_tokenizer(config, folder)
    half_life = options.far_half_life
    if half_life is None:
        half_life = config.sequence_length / 2
    print(options.prompt, end="", flush=True)
    for text in stream(
        model,
        tokenizer,
        options.prompt,
        options.num_tokens,
        options.seed,
        half_life or None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    ):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    define_flags()
    common.run(main)
