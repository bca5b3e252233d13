"""The settings of the protein example; every field is a flag."""

import dataclasses

from examples import common
from examples.common import option

TASKS = ("unidirectional", "masked")

# What stands in for files where no `--data_dir` is given.
EMBEDDED = "the 200 of UniProt beside the example"


@dataclasses.dataclass(frozen=True)
class Config(common.TrainingConfig):
    """A Performer language model of proteins and its training.

    Raises:
        examples.common.UserError: a value makes no sense; the message names
            the field.
    """

    task: str = option(
        "unidirectional",
        "unidirectional: predict each residue from those before it. masked: "
        "predict 15 % of the residues from all others.",
        choices=TASKS,
    )
    sequence_length: int = option(512, "Tokens in a row.")
    concatenate: bool = option(
        False,
        "String the sequences together and cut them into full rows; "
        "otherwise a row holds one sequence, or a part of one, and padding.",
    )
    tie_embeddings: bool = option(
        True, "Use the token embedding as the output layer too."
    )

    def __post_init__(self):
        super().__post_init__()
        common.check(
            self, "task", self.task in TASKS, f"one of {TASKS}"
        )
        common.check(
            self, "sequence_length", self.sequence_length > 1, "at least 2"
        )

    @property
    def causal(self):
        """Whether a token sees only itself and those before."""
        return self.task == "unidirectional"


@dataclasses.dataclass(frozen=True)
class Smoke(Config):
    """Shows that everything works, on 200 sequences of UniProt.

    Command: python -m examples.protein.train
    Time: a minute on 2 shared CPU threads, evaluation and export included;
        --task=masked the same.
    Score: perplexity 16.9, where letter counts give 17.8. With 35 kB of
    training sequences it learns little more than the counts.
    """

    # In rows of 256 the window of favor+ would be exact attention throughout.
    feature_map: str = "relu"
    sequence_length: int = 256
    batch_size: int = 8
    num_layers: int = 2
    hidden_dim: int = 64
    intermediate_dim: int = 256
    num_features: int = 64
    steps: int = 300
    validation_every: int = 50
    learning_rate: float = 3e-3


@dataclasses.dataclass(frozen=True)
class Small(Config):
    """A model of 800,000 weights, to compare kernels and tasks.

    Command: python -m examples.protein.train --preset=small --data_dir=DIR
    Time: 4 to 7 minutes on 2 CPU cores beside other work.
    Score: perplexity 17.3 on the validation split, where letter counts give
    18.1; --task=masked 17.6, where exact attention gives 17.4. See
    README.md.
    """

    validation_batches: int | None = 24
    jit_compile: bool = True


@dataclasses.dataclass(frozen=True)
class Paper(Config):
    """The protein model of the Performer article, with the ReLU kernel.

    Command: python -m examples.protein.train --preset=paper --data_dir=DIR
        --dtype_policy=mixed_bfloat16 --distribution=tpu
    Time, score: not measured here. It needs TrEMBL and an accelerator; the
    article trains it on TPUs.

    36 layers of 8 heads, width 512, feed-forward 1,024, 256 features. Rows
    of 1,024; `--sequence_length=8192 --concatenate --batch_size=8` is the
    article's task of long rows. Positions are rotary, and the projection
    keeps its first draw.
    """

    feature_map: str = "relu"
    sequence_length: int = 1024
    batch_size: int = 64
    num_layers: int = 36
    num_heads: int = 8
    hidden_dim: int = 512
    intermediate_dim: int = 1024
    num_features: int = 256
    dropout: float = 0.1
    steps: int = 100_000
    validation_every: int = 1000
    validation_batches: int | None = 50
    learning_rate: float = 1e-3
    warmup_steps: int = 1000


PRESETS = {"smoke": Smoke, "small": Small, "paper": Paper}
