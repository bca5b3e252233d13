"""Trains a causal Performer on images, exports it and shows it at work.

    python -m examples.imagenet64.train
    python -m examples.imagenet64.train --preset=small --data_dir=DIR

Every field of `config.Config` is a flag.
"""

import functools
import os
import time

import keras
import tensorflow as tf
from absl import flags

from examples import common
from examples.imagenet64 import config as configs
from examples.imagenet64 import data
from examples.imagenet64 import evaluate
from examples.imagenet64 import generate

VOCABULARY_SIZE = 256


def build_model(config):
    """The model of images: ids `[B, L]` int32 -> logits `[B, L, 256]` float32.

    Its positions are the sums of a row's, a column's and a channel's.

    Args:
        config: `config.Config`.

    Returns:
        A `keras_performer.PerformerLM`.

    Raises:
        examples.common.UserError: a layer refuses a value of the config.
    """
    return common.build_model(
        config,
        VOCABULARY_SIZE,
        config.sequence_length,
        position="learned",
        grid=(config.image_size, config.image_size, 3),
        name="imagenet64",
    )


def draws_samples(config):
    """Whether a model of this config draws images while it is trained.

    Not with exact attention, which carries no state from one sub-pixel to
    the next.
    """
    return config.sample_images > 0 and config.feature_map != "exact"


def write_samples(config, model):
    """Draws images into the current writer of `tf.summary`."""
    images = generate.draw(
        model, config, config.sample_images, seed=config.seed
    )
    tf.summary.image("samples", generate.grid(images)[None])


def metrics():
    """What `fit` reports beside the loss."""
    return [
        evaluate.BitsPerDimension(),
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
    ]


def train(config, data_dir, output_dir, verbose="auto"):
    """Trains a model and leaves all that belongs to it in `output_dir`.

    Args:
        config: `config.Config`.
        data_dir: see `data.load`.
        output_dir: folder, made if it is missing; see
            `common.claim_folder`. Receives `config.json`,
            `curve.csv`, `best.keras`, `last.keras` and `tensorboard/`.
        verbose: as in `keras.Model.fit`.

    Returns:
        `(model, validation)`: a model with the weights of the validation
        with the fewest bits per dimension, and the `data.Split`.
    """
    common.claim_folder(config, data_dir, output_dir)
    strategy = common.make_strategy(config)
    keras.utils.set_random_seed(config.seed)
    training = data.load(data_dir, "train")
    validation = data.load(data_dir, "validation")
    print(f"images: {data_dir or configs.EMBEDDED}")
    for name, split in (("train", training), ("validation", validation)):
        print(f"  {name:<11}{split.num_images:>10,}")

    with strategy.scope():
        model = build_model(config)
        common.compile_model(model, config, metrics())
    tokens = config.batch_size * config.sequence_length
    print(
        f"model: {model.count_params():,} parameters, "
        f"{config.sequence_length:,} sub-pixels, attention "
        f"{config.feature_map}\n"
        f"training: {config.steps:,} steps of {tokens:,} sub-pixels, "
        f"{config.steps * tokens:,} in all"
    )
    sample = None
    if draws_samples(config):
        sample = functools.partial(write_samples, config)
    elif config.sample_images:
        print("samples: none, exact attention has no state to draw from")
    model = common.fit(
        model,
        config,
        functools.partial(data.training_dataset, training, config),
        data.validation_dataset(validation, config),
        output_dir,
        "val_bits_per_dimension",
        data_dir=data_dir,
        sample=sample,
        verbose=verbose,
    )
    return model, validation


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    common.define_config_flags(configs.PRESETS, "smoke", flag_values)
    strings = {
        "data_dir": "Folder of images, npz or record files, or tfds:NAME; "
        "none: photographs inside scikit-image, which are there without a "
        "download.",
        "output_dir": "Folder of what the run leaves; none: "
        "runs/imagenet64-<preset>.",
    }
    for name, text in strings.items():
        flags.DEFINE_string(name, None, text, flag_values=flag_values)


def main(flag_values=flags.FLAGS):
    """Runs the command: train, score, export, reload, draw images.

    Args:
        flag_values: parsed `absl.flags.FlagValues`.

    Returns:
        The validation `evaluate.Score` of the whole split; None after
        training on a TPU.
    """
    started = time.monotonic()
    config = common.config_from_flags(configs.PRESETS, flag_values)
    output_dir = flag_values["output_dir"].value or os.path.join(
        "runs", f"imagenet64-{flag_values['preset'].value}"
    )
    model, validation = train(
        config, flag_values["data_dir"].value, output_dir
    )

    everything = None
    if common.scores_here(config):
        print("\nvalidation, best weights:")
        scores, everything = evaluate.score(model, validation, config)
        print(evaluate.table(scores + [everything]))
    common.draw_curve(output_dir, "bits_per_dimension", "bits per dimension")

    ((example, *_),) = data.validation_dataset(validation, config).take(1)
    common.export(model, example, output_dir)
    if draws_samples(config):
        path = os.path.join(output_dir, "samples.png")
        images = generate.draw(
            model, config, config.sample_images, seed=config.seed
        )
        generate.write_png(path, generate.grid(images))
        print(f"drawn by the model: {path}")
    print(f"\ndone in {time.monotonic() - started:.0f} s")
    common.finish(output_dir)
    return everything


if __name__ == "__main__":
    define_flags()
    common.run(main)
