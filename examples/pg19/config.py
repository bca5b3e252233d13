"""The settings of the PG-19 example; every field is a flag."""

import dataclasses
import json
import os

from examples import common
from examples.common import option


WITH_FAR_WEIGHT = ("favor+", "favor++", "favor#", "hedgehog")


@dataclasses.dataclass(frozen=True)
class Config:
    """A causal Performer language model and its training.

    Raises:
        examples.common.UserError: a value makes no sense; the message names
            the field.
    """

    tokenizer: str = option(
        "bytes",
        "bytes: 257 ids, nothing to learn. wordpiece: a vocabulary learned "
        "from the training split, or the file given by --vocabulary.",
        choices=("bytes", "wordpiece"),
    )
    vocabulary_size: int = option(
        257, "Ids of the tokenizer: 257 for bytes, at most this for wordpiece."
    )
    sequence_length: int = option(1024, "Tokens in a window.")
    batch_size: int = option(8, "Windows in a step.")
    shuffle_windows: int = option(
        4096, "Windows held in memory to shuffle from."
    )
    num_layers: int = option(4, "Performer blocks.")
    num_heads: int = option(4, "Attention heads in a block.")
    hidden_dim: int = option(128, "Width of the model.")
    intermediate_dim: int = option(512, "Width inside the feed-forward.")
    feature_map: str = option(
        "favor+",
        "Attention kernel, any name of keras_performer.feature_maps.get; "
        "exact: softmax attention; window: the local window, nothing beyond.",
    )
    num_features: int = option(128, "Random features per head.")
    local_window: int | None = option(
        None,
        "Tokens in a block of exact near attention; none: the layer's "
        "default; 0: the article's pure form.",
    )
    far_weight: float | None = option(
        None,
        "First value of a trained weight, in each head, of what is seen "
        "through features; none: the unbiased estimate. For favor+, favor++, "
        "favor# and hedgehog.",
    )
    dropout: float = option(0.0, "Dropout rate in the blocks.")
    tie_embeddings: bool = option(
        True, "Use the token embedding as the output layer too."
    )
    steps: int = option(600, "Training steps.")
    validation_every: int = option(
        100, "Steps between validations; divides --steps."
    )
    validation_batches: int | None = option(
        None,
        "Batches in the validations during training; none: the whole split, "
        "as at the end.",
    )
    learning_rate: float = option(2e-3, "Peak learning rate of AdamW.")
    warmup_steps: int = option(50, "Steps until the peak.")
    weight_decay: float = option(0.1, "Weight decay of AdamW.")
    gradient_clip: float | None = option(
        0.5, "Largest global norm of the gradient; none: no clipping."
    )
    jit_compile: bool = option(False, "Compile the training step with XLA.")
    dtype_policy: str = option(
        "float32",
        "Keras dtype policy of the layers.",
        choices=("float32", "mixed_bfloat16"),
    )
    seed: int = option(0, "Seed of weights, projections and data order.")

    def __post_init__(self):
        counts = (
            "sequence_length batch_size shuffle_windows num_layers num_heads "
            "hidden_dim intermediate_dim num_features steps validation_every"
        )
        for name in counts.split():
            common.check(
                self, name, getattr(self, name) > 0, "a positive integer"
            )
        for name in ("warmup_steps", "weight_decay", "seed"):
            common.check(self, name, getattr(self, name) >= 0, "at least 0")
        common.check(
            self, "learning_rate", self.learning_rate > 0, "more than 0"
        )
        common.check(self, "dropout", 0 <= self.dropout < 1, "0 <= rate < 1")
        common.check(
            self,
            "far_weight",
            self.far_weight is None or self.feature_map in WITH_FAR_WEIGHT,
            f"none unless feature_map is one of {WITH_FAR_WEIGHT}",
        )
        for name in ("validation_batches", "gradient_clip", "far_weight"):
            value = getattr(self, name)
            common.check(
                self, name, value is None or value > 0, "more than 0, or none"
            )
        common.check(
            self,
            "hidden_dim",
            self.hidden_dim % self.num_heads == 0,
            f"a multiple of num_heads={self.num_heads}",
        )
        common.check(
            self,
            "steps",
            self.steps % self.validation_every == 0,
            f"a multiple of validation_every={self.validation_every}",
        )
        if self.tokenizer == "bytes":
            common.check(
                self,
                "vocabulary_size",
                self.vocabulary_size == 257,
                "257 for bytes",
            )
        else:
            common.check(
                self, "vocabulary_size", self.vocabulary_size > 2, "over 2"
            )


@dataclasses.dataclass(frozen=True)
class Smoke(Config):
    """Shows that everything works, on the text that Python brings along.

    Command: python -m examples.pg19.train
    Time: 3.5 minutes on 2 CPU cores, evaluation and export included.
    Score: 2.88 bits per byte. With 320 kB of training text this is no
    language model; it learns to spell and to format.
    """

    # Twice the layer's window of 128 would be exact attention throughout.
    sequence_length: int = 512
    batch_size: int = 4
    num_layers: int = 2
    num_features: int = 64
    steps: int = 300
    learning_rate: float = 3e-3


@dataclasses.dataclass(frozen=True)
class Small(Config):
    """Bytes of novels, a model of a million weights, to compare kernels.

    Command: python -m examples.pg19.train --preset=small --data_dir=DIR
    Time: 45 minutes on one CPU core (23 minutes of it computing).
    Score: 2.30 bits per byte on a novel after training on five books; see
    README.md.
    """

    batch_size: int = 4
    steps: int = 600
    validation_batches: int | None = 24
    jit_compile: bool = True


@dataclasses.dataclass(frozen=True)
class Paper(Config):
    """The model of the Performer article (8 heads, 6 layers, 2048, 512).

    Command: python -m examples.pg19.train --preset=paper --data_dir=DIR
        --dtype_policy=mixed_bfloat16 --jit_compile
    Time, score: not measured here. It needs the full PG-19 and an
    accelerator; the article trains it on TPUs.

    `local_window=0` is the article's form, random features alone;
    `--local_window=none` is the layer's default, exact nearby. Positions are
    rotary, and the projection keeps its first draw.
    """

    tokenizer: str = "wordpiece"
    vocabulary_size: int = 32000
    sequence_length: int = 8192
    shuffle_windows: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    hidden_dim: int = 512
    intermediate_dim: int = 2048
    num_features: int = 256
    local_window: int | None = 0
    dropout: float = 0.1
    steps: int = 100_000
    validation_every: int = 1000
    validation_batches: int | None = 20
    learning_rate: float = 1e-3
    warmup_steps: int = 1000


PRESETS = {"smoke": Smoke, "small": Small, "paper": Paper}


def write(config, output_dir):
    """Writes `config.json`, which `evaluate` reads, into `output_dir`."""
    with open(
        os.path.join(output_dir, "config.json"), "w", encoding="utf-8"
    ) as file:
        json.dump(dataclasses.asdict(config), file, indent=2)
        file.write("\n")


def read(folder):
    """The `Config` that `write` left in `folder`.

    Raises:
        examples.common.UserError: there is none, or it is another program's.
    """
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            return Config(**json.load(file))
    except FileNotFoundError:
        raise common.UserError(
            "The training command writes config.json beside its models; "
            f"there is none at {path}."
        ) from None
    except (TypeError, json.JSONDecodeError) as error:
        raise common.UserError(
            f"{path} was not written by examples.pg19.train: {error}"
        ) from None
