"""Trains a Performer language model of proteins and exports it.

    python -m examples.protein.train
    python -m examples.protein.train --task=masked
    python -m examples.protein.train --preset=small --data_dir=DIR

Every field of `config.Config` is a flag.
"""

import functools
import os
import time

import keras
from absl import flags

from examples import common
from examples.protein import config as configs
from examples.protein import data
from examples.protein import evaluate


def build_model(config):
    """The language model: ids `[B, L]` int32 -> logits `[B, L, V]` float32.

    Padding is no key of attention, and no part of what FAVOR++ learns from.

    Args:
        config: `config.Config`.

    Returns:
        A `keras_performer.PerformerLM`.

    Raises:
        examples.common.UserError: a layer refuses a value of the config.
    """
    return common.build_model(
        config,
        data.VOCABULARY_SIZE,
        config.sequence_length,
        causal=config.causal,
        mask_zero=True,
        tie_embeddings=config.tie_embeddings,
        name="protein",
    )


def metrics():
    """What `fit` reports beside the loss."""
    return [
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        evaluate.Perplexity(),
    ]


def train(config, data_dir, output_dir, verbose="auto"):
    """Trains a model and leaves all that belongs to it in `output_dir`.

    Args:
        config: `config.Config`.
        data_dir: see `data.raw_examples`; no single file.
        output_dir: folder, made if it is missing; see
            `common.claim_folder`. Receives `config.json`,
            `unigram.json`, `curve.csv`, `curve.png`, `best.keras`,
            `last.keras` and `tensorboard/`.
        verbose: as in `keras.Model.fit`.

    Returns:
        `(model, validation, unigram)`; the model has the weights of the
        validation with the lowest perplexity.
    """
    if data_dir is not None and os.path.isfile(data_dir):
        raise common.UserError(
            "--data_dir: training needs a folder with train.fasta and "
            f"validation.fasta. Received the file {data_dir}"
        )
    common.claim_folder(config, data_dir, output_dir)
    strategy = common.make_strategy(config)
    keras.utils.set_random_seed(config.seed)
    proteins = data.load(data_dir, "train")
    validation = data.load(data_dir, "validation")
    print(f"proteins: {data_dir or configs.EMBEDDED}")
    for name, split in (("train", proteins), ("validation", validation)):
        print(f"  {name:<11}{split.report()}")
    unigram = evaluate.Unigram(proteins.counts())
    unigram.write(output_dir)

    with strategy.scope():
        model = build_model(config)
        common.compile_model(model, config, metrics())
    tokens = config.batch_size * config.sequence_length
    print(
        f"model: {model.count_params():,} parameters, task {config.task}, "
        f"attention {config.feature_map}\n"
        f"training: {config.steps:,} steps of {tokens:,} tokens, "
        f"{config.steps * tokens:,} in all"
    )
    model = common.fit(
        model,
        config,
        functools.partial(data.training_dataset, proteins, config),
        data.validation_dataset(validation, config),
        output_dir,
        "val_perplexity",
        data_dir=data_dir,
        verbose=verbose,
    )
    common.draw_curve(output_dir, "perplexity", "perplexity")
    return model, validation, unigram


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    common.define_config_flags(configs.PRESETS, "smoke", flag_values)
    strings = {
        "data_dir": "Folder with train.fasta(.gz) and validation.fasta(.gz), "
        "or with TFRecord files; none: the 200 proteins beside the example.",
        "output_dir": "Folder of what the run leaves; none: "
        "runs/protein-<preset>.",
    }
    for name, text in strings.items():
        flags.DEFINE_string(name, None, text, flag_values=flag_values)


def main(flag_values=flags.FLAGS):
    """Runs the command: train, score, export, reload.

    Args:
        flag_values: parsed `absl.flags.FlagValues`.

    Returns:
        The two `evaluate.Score` of the whole validation split, of the model
        and of the unigram; None after training on a TPU.
    """
    started = time.monotonic()
    config = common.config_from_flags(configs.PRESETS, flag_values)
    output_dir = flag_values["output_dir"].value or os.path.join(
        "runs", f"protein-{flag_values['preset'].value}"
    )
    model, validation, unigram = train(
        config, flag_values["data_dir"].value, output_dir
    )

    scores = None
    if common.scores_here(config):
        print("\nvalidation, best weights:")
        scores = evaluate.score(model, validation, config, unigram)
        print(evaluate.table(scores))

    example = next(iter(data.validation_dataset(validation, config)))[0]
    common.export(model, example, output_dir)
    print(
        f"curve: {os.path.join(output_dir, 'curve.png')}\n\n"
        f"done in {time.monotonic() - started:.0f} s"
    )
    common.finish(output_dir)
    return scores


if __name__ == "__main__":
    define_flags()
    common.run(main)
