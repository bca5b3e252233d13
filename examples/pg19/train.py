"""Trains a causal Performer language model, exports it and shows it at work.

    python -m examples.pg19.train
    python -m examples.pg19.train --preset=small --data_dir=DIR

Every field of `config.Config` is a flag.
"""

import filecmp
import functools
import os
import time

import keras
import numpy as np
import tensorflow as tf
from absl import flags

from examples import common
from examples.pg19 import config as configs
from examples.pg19 import data
from examples.pg19 import evaluate


def build_model(config, vocabulary_size):
    """The language model: ids `[B, L]` int32 -> logits `[B, L, V]` float32.

    Args:
        config: `config.Config`.
        vocabulary_size: int, V.

    Returns:
        A `keras_performer.PerformerLM`.

    Raises:
        examples.common.UserError: a layer refuses a value of the config.
    """
    return common.build_model(
        config,
        vocabulary_size,
        config.sequence_length,
        tie_embeddings=config.tie_embeddings,
        name="pg19",
    )


def make_tokenizer(config, documents, vocabulary, output_dir):
    """The tokenizer of the config; a vocabulary is left in `output_dir`.

    Args:
        config: `config.Config`.
        documents: list of `data.Document` to learn a vocabulary from.
        vocabulary: path of a vocabulary file, or None: the one that an
            earlier run left in `output_dir`, or else a new one.
        output_dir: existing folder.
    """
    if config.tokenizer == "bytes":
        if vocabulary is not None:
            raise common.UserError(
                "--vocabulary belongs to --tokenizer=wordpiece. Received: "
                f"--vocabulary={vocabulary}, --tokenizer=bytes"
            )
        return data.ByteTokenizer()
    kept = os.path.join(output_dir, "vocabulary.txt")
    if vocabulary is None and os.path.exists(kept):
        print(f"vocabulary: {kept}, from an earlier run")
        return data.WordPieceTokenizer.read(kept, config.vocabulary_size)
    if vocabulary is None:
        print("vocabulary: learning it from the training split ...")
        tokenizer = data.WordPieceTokenizer.learn(
            documents, config.vocabulary_size
        )
    else:
        tokenizer = data.WordPieceTokenizer.read(
            vocabulary, config.vocabulary_size
        )
        begun = os.path.exists(kept) and common.holds(
            output_dir, common.BACKUP, *common.CHECKPOINTS
        )
        if begun and not filecmp.cmp(vocabulary, kept, shallow=False):
            raise common.UserError(
                f"--vocabulary: the run in {output_dir} has another one. "
                f"Received: {vocabulary}"
            )
    tokenizer.write(kept)
    return tokenizer


def metrics(tokenizer):
    """What `fit` reports beside the loss."""
    return [
        evaluate.BitsPerByte(tokenizer.bytes_per_token),
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
    ]


def train(config, data_dir, output_dir, vocabulary=None, verbose="auto"):
    """Trains a model and leaves all that belongs to it in `output_dir`.

    Args:
        config: `config.Config`.
        data_dir: folder in PG-19's layout, or None: see `data.load`.
        output_dir: folder, made if it is missing; see
            `common.claim_folder`. Receives `config.json`,
            `vocabulary.txt` (WordPiece), `curve.csv`, `best.keras`,
            `last.keras` and `tensorboard/`.
        vocabulary: see `make_tokenizer`.
        verbose: as in `keras.Model.fit`.

    Returns:
        `(model, tokenizer)`; the model has the weights of the validation
        with the fewest bits per byte.
    """
    common.claim_folder(config, data_dir, output_dir)
    strategy = common.make_strategy(config)
    keras.utils.set_random_seed(config.seed)
    documents = data.load(data_dir, "train")
    validation = data.load(data_dir, "validation")
    tokenizer = make_tokenizer(config, documents, vocabulary, output_dir)
    print(f"text: {data_dir or configs.EMBEDDED}")
    for name, split in (("train", documents), ("validation", validation)):
        size = sum(document.num_bytes for document in split)
        print(f"  {name:<11}{len(split):>7,} documents {size:>15,} bytes")

    with strategy.scope():
        model = build_model(config, tokenizer.vocabulary_size)
        common.compile_model(model, config, metrics(tokenizer))
    tokens = config.batch_size * config.sequence_length
    print(
        f"model: {model.count_params():,} parameters, "
        f"{tokenizer.vocabulary_size:,} ids, attention {config.feature_map}\n"
        f"training: {config.steps:,} steps of {tokens:,} tokens, "
        f"{config.steps * tokens:,} in all"
    )
    model = common.fit(
        model,
        config,
        functools.partial(
            data.training_dataset, documents, tokenizer, config
        ),
        data.validation_dataset(validation, tokenizer, config),
        output_dir,
        "val_bits_per_byte",
        data_dir=data_dir,
        sample=functools.partial(_show_text, tokenizer, validation[0], config),
        verbose=verbose,
    )
    return model, tokenizer


# Of the text that TensorBoard shows after each validation.
SHOWN_BYTES, SHOWN_TOKENS = 100, 200


def _show_text(tokenizer, document, config, model):
    """Writes the model's continuation of a document to TensorBoard."""
    (text,) = data.texts([document])
    prompt = text.numpy()[:SHOWN_BYTES].decode("utf-8", errors="ignore")
    new = model.generate(
        [evaluate.prompt_ids(tokenizer, prompt)],
        SHOWN_TOKENS,
        temperature=0.7,
        seed=config.seed,
    )
    text = tokenizer.detokenize(new[0])
    tf.summary.text("continuation", f"    {prompt}|{text}")


def continue_text(
    generate, tokenizer, prompt, num_tokens, temperature=0.8, seed=0
):
    """Samples a continuation.

    Args:
        generate: function `(ids, num_tokens, temperature, seed)`, the
            endpoint of an exported model: int32 ids `[1, L]` -> new ids
            `[1, num_tokens]`.
        tokenizer: the tokenizer of the model.
        prompt: string.
        num_tokens: int, the most tokens to add.
        temperature: float; below 1 safer, above 1 wilder, 0 always the
            likeliest token.
        seed: int, seed of the draws.

    Returns:
        The continuation, a string. It ends early where the model ends the
        document.
    """
    if not num_tokens:
        return ""
    new = generate(
        tf.constant([evaluate.prompt_ids(tokenizer, prompt)], tf.int32),
        tf.constant(num_tokens),
        tf.constant(temperature, tf.float32),
        tf.constant(seed),
    )[0].numpy()
    ends = np.nonzero(new == 0)[0]
    return tokenizer.detokenize(new[: ends[0]] if ends.size else new)


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    common.define_config_flags(configs.PRESETS, "smoke", flag_values)
    strings = {
        "data_dir": "Folder in PG-19's layout; none: Python's own "
        "documentation, which is there without a download.",
        "output_dir": "Folder of what the run leaves; none: "
        "runs/pg19-<preset>.",
        "vocabulary": "Vocabulary file of an earlier run with "
        "--tokenizer=wordpiece.",
    }
    for name, text in strings.items():
        flags.DEFINE_string(name, None, text, flag_values=flag_values)
    flags.DEFINE_string(
        "prompt",
        "The value of ",
        "Text that the trained model continues.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "sample_tokens",
        250,
        "Tokens of the continuation.",
        lower_bound=0,
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "temperature",
        0.7,
        "Of the continuation; 0: the likeliest token.",
        lower_bound=0.0,
        flag_values=flag_values,
    )


def main(flag_values=flags.FLAGS):
    """Runs the command: train, score, export, reload, continue a prompt.

    Args:
        flag_values: parsed `absl.flags.FlagValues`.

    Returns:
        The validation `evaluate.Score` of the whole split; None after
        training on a TPU.
    """
    started = time.monotonic()
    config = common.config_from_flags(configs.PRESETS, flag_values)
    output_dir = flag_values["output_dir"].value or os.path.join(
        "runs", f"pg19-{flag_values['preset'].value}"
    )
    data_dir = flag_values["data_dir"].value
    model, tokenizer = train(
        config, data_dir, output_dir, flag_values["vocabulary"].value
    )

    validation = data.load(data_dir, "validation")
    everything = None
    if common.scores_here(config):
        print("\nvalidation, best weights:")
        scores, everything = evaluate.score(
            model, validation, tokenizer, config
        )
        print(evaluate.table(scores + [everything]))
    common.draw_curve(output_dir, "bits_per_byte", "bits per byte")

    example = next(
        iter(data.validation_dataset(validation, tokenizer, config))
    )[0]
    path = common.export(model, example, output_dir)
    prompt = flag_values["prompt"].value
    exported = tf.saved_model.load(path)  # holds the variables
    continuation = continue_text(
        exported.generate,
        tokenizer,
        prompt,
        flag_values["sample_tokens"].value,
        flag_values["temperature"].value,
        config.seed,
    )
    print(
        f"\nthe reloaded model continues [{prompt}]:\n"
        f"{prompt}{continuation}\n\n"
        f"done in {time.monotonic() - started:.0f} s"
    )
    common.finish(output_dir)
    return everything


if __name__ == "__main__":
    define_flags()
    common.run(main)
