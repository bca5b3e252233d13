"""Accuracy and perplexity of a saved model beside those of letter counts.

    python -m examples.protein.evaluate --model runs/protein-smoke/best.keras

The model is a `.keras` file or the SavedModel folder of a training run; its
`config.json` and `unigram.json` must still stand beside it.
"""

import dataclasses
import json
import math
import os

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import ops

from examples import common
from examples.protein import config as configs
from examples.protein import data


@keras.saving.register_keras_serializable("keras_performer_examples")
class Perplexity(keras.metrics.SparseCategoricalCrossentropy):
    """exp of the mean cross-entropy, weighted.

    Args:
        name: string.
        dtype: dtype of the sums.
    """

    def __init__(self, name="perplexity", dtype=None):
        super().__init__(name=name, dtype=dtype, from_logits=True)

    def result(self):
        return ops.exp(super().result())

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype}


class Unigram:
    """Predicts each residue by how often it occurs: the floor to beat.

    Each count is one more than it is, so that no residue is impossible.

    Args:
        counts: `[data.VOCABULARY_SIZE]`, how often each id occurs in the
            training split; those of other ids than residues do not matter.

    Attributes:
        nats: float64 `[data.VOCABULARY_SIZE]`, -log p of each residue.
        likeliest: int, the id of the commonest residue.
    """

    def __init__(self, counts):
        self.counts = np.asarray(counts)
        kept = self.counts[data.FIRST : data.UNKNOWN] + 1.0
        self.nats = np.zeros(data.VOCABULARY_SIZE)
        self.nats[data.FIRST : data.UNKNOWN] = -np.log(kept / kept.sum())
        self.likeliest = data.FIRST + int(np.argmax(kept))

    def write(self, folder):
        """Writes `unigram.json`, which `read` reads, into `folder`."""
        path = os.path.join(folder, "unigram.json")
        counts = self.counts[data.FIRST : data.MASK].tolist()
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dict(zip(data.LETTERS, counts)), file, indent=2)
            file.write("\n")

    @classmethod
    def read(cls, folder):
        """What `write` left in `folder`.

        Raises:
            examples.common.UserError: nothing, or something else.
        """
        path = os.path.join(folder, "unigram.json")
        counts = np.zeros(data.VOCABULARY_SIZE, "int64")
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            counts[data.FIRST : data.MASK] = [found[x] for x in data.LETTERS]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise common.UserError(
                "The training command writes unigram.json beside its models; "
                f"{path} cannot be read ({error!r})."
            ) from None
        return cls(counts)


@dataclasses.dataclass
class Score:
    """How well residues were predicted.

    Args:
        name: string, who predicted them.
        residues: int, how many were predicted.
        correct: float, how many of them rightly.
        nats: float, summed -log p of all.
    """

    name: str
    residues: int = 0
    correct: float = 0.0
    nats: float = 0.0

    @property
    def accuracy(self):
        """Float from 0 to 1; nan for no residues."""
        return self.correct / self.residues if self.residues else math.nan

    @property
    def perplexity(self):
        """exp(nats / residues); nan for no residues."""
        if not self.residues:
            return math.nan
        mean = self.nats / self.residues
        return math.exp(mean) if mean < 700 else math.inf


def score(model, proteins, config, unigram, verbose=1):
    """Scores a model, and the unigram on the same residues.

    Args:
        model: callable, ids `[batch_size, L]` -> logits `[batch_size, L, V]`.
        proteins: `data.Proteins`.
        config: `config.Config`.
        unigram: `Unigram` of the training split.
        verbose: 1 shows a progress bar of batches, 0 nothing.

    Returns:
        List of two `Score`: of the model and of the unigram.
    """

    @tf.function(jit_compile=config.jit_compile)
    def sums(x, y, weight):
        logits = model(x)
        right = ops.cast(ops.equal(ops.argmax(logits, axis=-1), y), "float32")
        nats = common.token_nats(y, logits)
        return ops.sum(right * weight), ops.sum(nats * weight)

    dataset = data.evaluation_dataset(proteins, config)
    own, floor = Score("model"), Score("unigram")
    bar = keras.utils.Progbar(
        int(dataset.cardinality()), unit_name="batch", verbose=verbose
    )
    for x, y, weight in dataset:
        right, nats = sums(x, y, weight)
        own.correct += float(right)
        own.nats += float(nats)
        residues = y.numpy()[weight.numpy() > 0]
        own.residues += residues.size
        floor.correct += int(np.sum(residues == unigram.likeliest))
        floor.nats += float(np.sum(unigram.nats[residues]))
        bar.add(1)
    floor.residues = own.residues
    return [own, floor]


def table(scores):
    """Scores as the lines of a table."""
    lines = [f"{'':<10}{'residues':>14}{'accuracy':>11}{'perplexity':>13}"]
    for one in scores:
        lines.append(
            f"{one.name:<10}{one.residues:>14,}{one.accuracy:>11.2%}"
            f"{one.perplexity:>13.3f}"
        )
    return "\n".join(lines)


def evaluate(path, data_dir, split, verbose=1):
    """Loads a saved model and scores it on one split.

    Args:
        path: `.keras` file or SavedModel folder, `config.json` and
            `unigram.json` beside it.
        data_dir: see `data.raw_examples`; None: that of the training.
        split: "train", "validation" or "test".
        verbose: 1 tells of the data and shows a progress bar, 0 nothing.

    Returns:
        List of two `Score`: of the model and of the unigram.
    """
    folder = os.path.dirname(os.path.abspath(path))
    model = common.load_model(path)
    config = common.read_config(configs.Config, folder)
    unigram = Unigram.read(folder)
    data_dir = common.evaluation_data_dir(
        data_dir, folder, configs.EMBEDDED, verbose
    )
    proteins = data.load(data_dir, split)
    if verbose:
        print(f"task: {config.task}\n{proteins.report()}")
    return score(model, proteins, config, unigram, verbose)


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    common.define_evaluation_flags(
        data.SPLITS,
        "As in training, or one FASTA file; none: those of the training.",
        "Which proteins of a folder.",
        flag_values,
    )


def main(flag_values=flags.FLAGS):
    """Runs the command with parsed `absl.flags.FlagValues`."""
    model, data_dir, split = (
        flag_values[name].value for name in ("model", "data_dir", "split")
    )
    print(table(evaluate(model, data_dir, split)))


if __name__ == "__main__":
    define_flags()
    common.run(main)
