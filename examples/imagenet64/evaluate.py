"""Bits per dimension of a saved model on a split.

    python -m examples.imagenet64.evaluate \\
        --model=runs/imagenet64-smoke/best.keras

The model is a `.keras` file or the SavedModel folder of a training run; its
`config.json` must still stand beside it.
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
from examples.imagenet64 import config as configs
from examples.imagenet64 import data


@keras.saving.register_keras_serializable("keras_performer_examples")
class BitsPerDimension(keras.metrics.Metric):
    """Bits that the model spends on a sub-pixel: summed loss / ln 2 / number.

    Args:
        name: string.
        dtype: dtype of the sums.
    """

    def __init__(self, name="bits_per_dimension", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.nats = self.add_variable((), "zeros", name="nats")
        self.dimensions = self.add_variable((), "zeros", name="dimensions")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch.

        Args:
            y_true: int ids `[B, L]`.
            y_pred: logits `[B, L, V]`.
            sample_weight: `[B, L]`, 0 on padding. None: all count.
        """
        nats = common.token_nats(y_true, y_pred)
        count = ops.ones_like(nats)
        if sample_weight is not None:
            nats = nats * sample_weight
            count = count * sample_weight
        self.nats.assign_add(ops.cast(ops.sum(nats), self.dtype))
        self.dimensions.assign_add(ops.cast(ops.sum(count), self.dtype))

    def result(self):
        bits = self.nats / math.log(2.0)
        return ops.divide_no_nan(bits, self.dimensions)


@dataclasses.dataclass
class Score:
    """What a model spends on images.

    Args:
        name: string, a channel or "all".
        images: int.
        dimensions: int, the sub-pixels of the images.
        nats: float, summed -log p of the sub-pixels.
    """

    name: str
    images: int
    dimensions: int
    nats: float

    @property
    def bits_per_dimension(self):
        """Float."""
        return self.nats / math.log(2.0) / self.dimensions


def score(model, split, config, verbose=1):
    """Scores a model on all images of a split.

    Args:
        model: callable, ids `[batch_size, L]` -> logits `[batch_size, L, V]`.
        split: `data.Split`.
        config: `config.Config`.
        verbose: 1 shows a progress bar of images, 0 nothing.

    Returns:
        List of `Score`, one a channel, and the `Score` of all.
    """

    @tf.function(jit_compile=config.jit_compile)
    def channel_nats(x, y, weight):
        nats = common.token_nats(y, model(x)) * weight
        return ops.sum(ops.reshape(nats, (x.shape[0], -1, 3)), axis=1)

    nats, images = np.zeros(3), 0
    bar = keras.utils.Progbar(
        split.num_images, unit_name="image", verbose=verbose
    )
    for x, y, weight in data.evaluation_dataset(split, config):
        nats += channel_nats(x, y, weight).numpy().sum(0, dtype="float64")
        images += int(weight[:, 0].numpy().sum())
        bar.update(images, finalize=False)
    bar.update(images, finalize=True)
    pixels = images * config.image_size**2
    scores = [
        Score(name, images, pixels, float(one))
        for name, one in zip(("red", "green", "blue"), nats, strict=True)
    ]
    return scores, Score("all", images, 3 * pixels, float(nats.sum()))


def table(scores):
    """Scores as the lines of a table."""
    lines = [f"{'channel':<9}{'images':>9}{'sub-pixels':>15}{'bits/dim':>10}"]
    for one in scores:
        lines.append(
            f"{one.name:<9}{one.images:>9,}{one.dimensions:>15,}"
            f"{one.bits_per_dimension:>10.4f}"
        )
    return "\n".join(lines)


def evaluate(path, data_dir, split, verbose=1):
    """Loads a saved model and scores it on one split.

    Args:
        path: `.keras` file or SavedModel folder, `config.json` beside it.
        data_dir: see `data.load`; None: that of the training.
        split: "train" or "validation".
        verbose: 1 shows a progress bar, 0 nothing.

    Returns:
        List of `Score`, one a channel, and the `Score` of all.
    """
    model = common.load_model(path)
    folder = os.path.dirname(os.path.abspath(path))
    config = common.read_config(configs.Config, folder)
    data_dir = common.evaluation_data_dir(
        data_dir, folder, configs.EMBEDDED, verbose
    )
    return score(model, data.load(data_dir, split), config, verbose)


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    common.define_evaluation_flags(
        data.SPLITS,
        "Folder of images, npz or record files, or tfds:NAME; none: those "
        "of the training.",
        "Which images.",
        flag_values,
    )


def main():
    """Runs the command with the flags of `absl.flags.FLAGS`."""
    options = flags.FLAGS
    scores, everything = evaluate(
        options.model, options.data_dir, options.split
    )
    print(table(scores + [everything]))


if __name__ == "__main__":
    define_flags()
    common.run(main)
