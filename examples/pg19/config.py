"""The settings of the PG-19 example; every field is a flag."""

import dataclasses

from examples import common
from examples.common import option

# What stands in for files where no `--data_dir` is given.
EMBEDDED = "the documentation inside Python"


@dataclasses.dataclass(frozen=True)
class Config(common.TrainingConfig):
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
    shuffle_windows: int = option(
        4096, "Windows held in memory to shuffle from."
    )
    mix_documents: bool = option(
        False,
        "Let a training window go on with the next document; otherwise it is "
        "filled up with padding.",
    )
    tie_embeddings: bool = option(
        True, "Use the token embedding as the output layer too."
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("sequence_length", "shuffle_windows"):
            common.check(
                self, name, getattr(self, name) > 0, "a positive integer"
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
    Time: 2.5 minutes on 2 CPU threads beside other work, evaluation and export
    included.
    Score: 2.90 bits per byte. With 320 kB of training text this is no
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
    Time: 6 minutes on 2 CPU cores beside other work.
    Score: 2.24 bits per byte on a novel after training on five books; see
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

