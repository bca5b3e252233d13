"""The settings of the ImageNet64 example; every field is a flag."""

import dataclasses

from examples import common
from examples.common import option

# What stands in for files where no `--data_dir` is given.
EMBEDDED = "photographs inside scikit-image"


@dataclasses.dataclass(frozen=True)
class Config(common.TrainingConfig):
    """A causal Performer over the sub-pixels of images, and its training.

    Raises:
        examples.common.UserError: a value makes no sense; the message names
            the field.
    """

    image_size: int = option(
        64,
        "Rows and columns of an image: 64, or a part of it (32, 16, 8, 4) "
        "by the mean of neighbouring pixels.",
    )
    sample_images: int = option(
        4,
        "Images drawn after each validation, for TensorBoard, and at the "
        "end; 0: none.",
    )

    def __post_init__(self):
        super().__post_init__()
        common.check(
            self,
            "image_size",
            self.image_size in (4, 8, 16, 32, 64),
            "4, 8, 16, 32 or 64",
        )
        common.check(
            self, "sample_images", self.sample_images >= 0, "at least 0"
        )

    @property
    def sequence_length(self):
        """Int, the sub-pixels of an image."""
        return self.image_size * self.image_size * 3


@dataclasses.dataclass(frozen=True)
class Smoke(Config):
    """Shows that everything works, on photographs of scikit-image.

    Command: python -m examples.imagenet64.train
    Time: 2 minutes on 2 CPU threads beside other work, evaluation, export
    and samples included.
    Score: 5.89 bits per dimension. With five photographs of training images
    it learns that neighbours are alike, not what a picture shows.
    """

    image_size: int = 16
    batch_size: int = 4
    num_layers: int = 2
    num_features: int = 64
    # More than a row of 48 sub-pixels. The default, 128, would see most of
    # such an image exactly.
    local_window: int | None = 64
    steps: int = 250
    validation_every: int = 50
    learning_rate: float = 3e-3


@dataclasses.dataclass(frozen=True)
class Small(Config):
    """A model of a million weights, on a CPU.

    Command: python -m examples.imagenet64.train --preset=small
        --data_dir=DIR
    Time: 15 minutes on 2 CPU cores beside other work, at 2 seconds a step.
    Score: 5.03 bits per dimension on photographs that it has not seen, after
    400 steps of 4; see README.md.
    """

    image_size: int = 32
    batch_size: int = 4
    steps: int = 400
    validation_batches: int | None = 12
    jit_compile: bool = True


@dataclasses.dataclass(frozen=True)
class Paper(Config):
    """The model of the Performer article (8 heads, 6 layers, 2048, 512).

    Command: python -m examples.imagenet64.train --preset=paper
        --data_dir=DIR --dtype_policy=mixed_bfloat16 --jit_compile
    Time, score: not measured here. It needs the full ImageNet64 and an
    accelerator; the article trains it on TPUs.

    `local_window=0` is the article's form, random features alone;
    `--local_window=none` is the layer's default, exact nearby. The
    projection keeps its first draw.
    """

    num_layers: int = 6
    num_heads: int = 8
    hidden_dim: int = 512
    intermediate_dim: int = 2048
    num_features: int = 256
    local_window: int | None = 0
    dropout: float = 0.1
    steps: int = 100_000
    validation_every: int = 1000
    validation_batches: int | None = 100
    learning_rate: float = 1e-3
    warmup_steps: int = 1000


PRESETS = {"smoke": Smoke, "small": Small, "paper": Paper}
