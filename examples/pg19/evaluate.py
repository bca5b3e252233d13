"""Bits per byte and word-level perplexity of a saved model on a split.

    python -m examples.pg19.evaluate --model runs/pg19-smoke/best.keras

The model is a `.keras` file or the SavedModel folder of a training run; its
`config.json` (and `vocabulary.txt`) must still stand beside it.
"""

import dataclasses
import math
import os

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import ops

from examples import common
from examples.pg19 import config as configs
from examples.pg19 import data


@keras.saving.register_keras_serializable("keras_performer_examples")
class BitsPerByte(keras.metrics.Metric):
    """Bits that the model spends on a byte of text: summed loss / bytes.

    Unlike the loss per token it can be compared between tokenizers.

    Args:
        bytes_per_token: list of int, the bytes behind each id. None: one
            byte for every id but 0.
        name: string.
        dtype: dtype of the sums.
    """

    def __init__(
        self, bytes_per_token=None, name="bits_per_byte", dtype=None
    ):
        super().__init__(name=name, dtype=dtype)
        self.bytes_per_token = bytes_per_token
        self.nats = self.add_variable((), "zeros", name="nats")
        self.bytes = self.add_variable((), "zeros", name="bytes")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch.

        Args:
            y_true: int ids `[B, L]`.
            y_pred: logits `[B, L, V]`.
            sample_weight: `[B, L]`, 0 on padding. None: all count.
        """
        nats = common.token_nats(y_true, y_pred)
        if self.bytes_per_token is None:
            sizes = ops.not_equal(y_true, 0)
        else:
            sizes = ops.take(
                ops.array(self.bytes_per_token), ops.cast(y_true, "int32")
            )
        sizes = ops.cast(sizes, self.dtype)
        if sample_weight is not None:
            nats = nats * sample_weight
            sizes = sizes * sample_weight
        self.nats.assign_add(ops.cast(ops.sum(nats), self.dtype))
        self.bytes.assign_add(ops.sum(sizes))

    def result(self):
        bits = self.nats / math.log(2.0)
        return ops.divide_no_nan(bits, self.bytes)

    def get_config(self):
        return {
            **super().get_config(),
            "bytes_per_token": self.bytes_per_token,
        }


@dataclasses.dataclass
class Score:
    """What a model spends on a text.

    Args:
        name: string, a book's id or "all".
        title: string.
        nats: float, summed -log p of all tokens and end marks.
        bytes: int, length of the text in UTF-8.
        words: int, its words by white space.
        unknown: int, tokens that stand for unknown words. The model did not
            spell them out: with many of them the score flatters.
    """

    name: str
    title: str
    nats: float
    bytes: int
    words: int
    unknown: int = 0

    @property
    def bits_per_byte(self):
        """Float; nan for a text without bytes."""
        if not self.bytes:
            return math.nan
        return self.nats / math.log(2.0) / self.bytes

    @property
    def word_perplexity(self):
        """exp(nats / words), PG-19's measure; nan without words."""
        if not self.words:
            return math.nan
        # An untrained model on long words may leave the range of a float.
        per_word = self.nats / self.words
        return math.exp(per_word) if per_word < 700 else math.inf


def score(
    model,
    documents,
    tokenizer,
    config,
    verbose=1,
    carry_state=False,
    far_half_life=None,
):
    """Scores a model on documents.

    Args:
        model: callable, ids `[batch_size, L]` -> logits `[batch_size, L, V]`;
            with `carry_state` a `keras_performer.PerformerLM`.
        documents: list of `data.Document`.
        tokenizer: the tokenizer that the model was trained with.
        config: `config.Config`.
        verbose: 1 shows a progress bar of bytes, 0 nothing.
        carry_state: whether a document is read from its start to its end, so
            that every token has its whole past. Otherwise each window is
            predicted from its own start: its first tokens have no context,
            so longer windows score better.
        far_half_life: with `carry_state`, bytes or word pieces after which
            what lies beyond the layers' local window weighs half as much;
            None: never.

    Returns:
        List of `Score`, one a document, and the `Score` of all.
    """
    nats = np.zeros(len(documents))
    unknown = np.zeros(len(documents), "int64")
    total = sum(document.num_bytes for document in documents)
    bar = keras.utils.Progbar(
        -(-total // 1000), unit_name="kB", verbose=verbose
    )
    sizes = np.ones(tokenizer.vocabulary_size, "int64")
    sizes[0] = 0
    if tokenizer.bytes_per_token is not None:
        sizes = np.array(tokenizer.bytes_per_token)
    done = 0
    if carry_state:
        parts = _carried_nats(
            model, documents, tokenizer, config, far_half_life
        )
    else:
        parts = _window_nats(model, documents, tokenizer, config)
    for found, y, weight, index in parts:
        np.add.at(nats, index, found)
        if tokenizer.unknown_id is not None:
            found = (y == tokenizer.unknown_id).sum(axis=-1)
            np.add.at(unknown, index, found)
        done += int((sizes[y] * weight).sum())
        bar.update(min(done, total) // 1000, finalize=False)
    bar.update(bar.target, finalize=True)
    scores = [
        Score(
            document.name,
            document.title,
            float(nats[i]),
            document.num_bytes,
            document.num_words,
            int(unknown[i]),
        )
        for i, document in enumerate(documents)
    ]
    everything = Score("all", "", 0.0, 0, 0)
    for one in scores:
        everything.nats += one.nats
        everything.bytes += one.bytes
        everything.words += one.words
        everything.unknown += one.unknown
    return scores, everything


def _window_nats(model, documents, tokenizer, config):
    """Yields arrays: nats of windows, targets, weights, document's index."""

    @tf.function(jit_compile=config.jit_compile)
    def window_nats(x, y, weight):
        return ops.sum(common.token_nats(y, model(x)) * weight, axis=-1)

    for x, y, weight, index in data.evaluation_dataset(
        documents, tokenizer, config
    ):
        nats = window_nats(x, y, weight)
        yield nats.numpy(), y.numpy(), weight.numpy(), index.numpy()


def _carried_nats(model, documents, tokenizer, config, far_half_life):
    """The same of segments of which each continues the one before."""
    length = config.sequence_length

    @tf.function(jit_compile=config.jit_compile)
    def segment_nats(x, y, weight, state):
        state = model.fade(state, length, far_half_life)
        logits, state = model.step(x, state)
        nats = ops.sum(common.token_nats(y, logits) * weight, axis=-1)
        return nats, state

    texts = data.texts(documents)
    for index, text in enumerate(texts):
        state = model.get_initial_state(1)
        parts = data.segments(text, tokenizer, length)
        for x, y, weight in zip(*parts, strict=True):
            x, y, weight = x[None], y[None], weight[None]
            nats, state = segment_nats(x, y, weight, state)
            yield nats.numpy(), y.numpy(), weight.numpy(), [index]


def table(scores):
    """Scores as the lines of a table."""
    lines = [
        f"{'book':<22}{'bytes':>10}{'words':>9}{'bits/byte':>11}"
        f"{'word perplexity':>17}  title"
    ]
    for one in scores:
        perplexity = one.word_perplexity
        digits = ",.1f" if perplexity < 1e9 else ".3g"
        lines.append(
            f"{one.name:<22}{one.bytes:>10,}{one.words:>9,}"
            f"{one.bits_per_byte:>11.4f}{perplexity:>17{digits}}"
            f"  {one.title}".rstrip()
        )
        if one.unknown:
            lines.append(
                f"{'':<22}{one.unknown:,} tokens are unknown words; they "
                "cost less than their letters would."
            )
    return "\n".join(lines)


def load_tokenizer(config, folder):
    """The tokenizer of a training run from the files in its folder."""
    if config.tokenizer == "bytes":
        return data.ByteTokenizer()
    return data.WordPieceTokenizer.read(
        os.path.join(folder, "vocabulary.txt"), config.vocabulary_size
    )


def prompt_ids(tokenizer, prompt):
    """The mark of a start, and the tokens of a string: a list of int."""
    return [0] + [int(i) for i in tokenizer.tokenize([prompt])[0]]


def evaluate(
    path, data_dir, split, verbose=1, carry_state=False, far_half_life=None
):
    """Loads a saved model and scores it on one split.

    Args:
        path: `.keras` file or SavedModel folder, `config.json` beside it.
        data_dir: see `data.load`; None: that of the training.
        split: "train", "validation" or "test".
        verbose: 1 shows a progress bar, 0 nothing.
        carry_state: see `score`.
        far_half_life: see `score`.

    Returns:
        List of `Score`, one a document, and the `Score` of all.

    Raises:
        examples.common.UserError: no such model, or one that cannot carry a
            state; a half-life without one.
    """
    if far_half_life is not None and not carry_state:
        raise common.UserError("--far_half_life needs --carry_state.")
    folder = os.path.dirname(os.path.abspath(path))
    model = common.load_model(path, "--carry_state" if carry_state else None)
    config = common.read_config(configs.Config, folder)
    tokenizer = load_tokenizer(config, folder)
    data_dir = common.evaluation_data_dir(
        data_dir, folder, configs.EMBEDDED, verbose
    )
    documents = data.load(data_dir, split)
    return score(
        model,
        documents,
        tokenizer,
        config,
        verbose,
        carry_state,
        far_half_life,
    )


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    common.define_evaluation_flags(
        data.SPLITS,
        "Folder in PG-19's layout; none: that of the training.",
        "Which texts.",
        flag_values,
    )
    flags.DEFINE_bool(
        "carry_state",
        False,
        "Read each document from its start to its end: every token has its "
        "whole past. Otherwise each window starts anew.",
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "far_half_life",
        None,
        "With --carry_state: tokens after which what lies beyond the local "
        "window weighs half as much; none: never.",
        lower_bound=1e-3,
        flag_values=flag_values,
    )


def main():
    """Runs the command with the flags of `absl.flags.FLAGS`."""
    options = flags.FLAGS
    scores, everything = evaluate(
        options.model,
        options.data_dir,
        options.split,
        carry_state=options.carry_state,
        far_half_life=options.far_half_life,
    )
    print(table(scores + [everything]))


if __name__ == "__main__":
    define_flags()
    common.run(main)
