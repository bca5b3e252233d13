"""What the pipelines share: flags, optimizer, callbacks and errors.

A preset is a frozen dataclass. Every field of it is a flag of the same name,
so `--preset=small --num_layers=2` is the `small` preset with one change.
"""

import csv
import dataclasses
import datetime
import logging
import math
import os
import sys
import types
import typing

import keras
from absl import app
from absl import flags
from absl import logging as absl_logging

from keras_performer import FeatureMap
from keras_performer import feature_maps

# The weights that AdamW must not pull towards zero: Keras matches these words
# in the names of the variables.
WITHOUT_DECAY = (
    "bias",
    "gamma",
    "beta",
    "embedding",
    # Their zero is no weaker weight, but a weight of 1.
    "log_far_weight",
    "log_temperature",
)


class UserError(ValueError):
    """Something that the person at the command line can mend.

    `run` prints its message without a traceback and exits with status 1.
    """


def run(main):
    """Runs the command `main()` under absl, with one-line errors.

    Args:
        main: function without arguments. It reads `absl.flags.FLAGS`.
            A `UserError` that it raises ends the process with status 1 and
            the message on stderr; any other exception keeps its traceback.
    """

    def command(arguments):
        if not flags.FLAGS["verbosity"].present:
            absl_logging.set_verbosity(absl_logging.WARNING)
        try:
            if len(arguments) > 1:
                raise UserError(
                    f"Unexpected argument {arguments[1]!r}. Every option is "
                    "a flag: --name=value. See --help."
                )
            if keras.backend.backend() != "tensorflow":
                raise UserError(
                    "The examples read their data with tf.data and export a "
                    "SavedModel, so they need the TensorFlow backend. "
                    f"Received: KERAS_BACKEND={keras.backend.backend()}"
                )
            main()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    # At the default level TensorFlow tells of every variable it exports.
    logging.getLogger("tensorflow").setLevel(logging.WARNING)
    app.run(command)


def option(default, help, choices=None):
    """A field of a preset together with the help text of its flag.

    Args:
        default: value of the field.
        help: string, what the field means.
        choices: tuple of the allowed strings, or None.

    Returns:
        A `dataclasses.field`.
    """
    metadata = {"help": help, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@keras.saving.register_keras_serializable(package="keras_performer_examples")
class WindowOnly(FeatureMap):
    """No far part: what the local window sees exactly, and nothing beyond.

    A comparison that tells what the features add. Its one feature is 0 (its
    logarithm so small that nothing is left of it), and no feature map of use.
    """

    log_space = True
    estimates_softmax = True

    def __call__(self, x, projection=None, is_query=True):
        return keras.ops.full_like(x[..., :1], -1e30)


def get_feature_map(name, far_weight=None):
    """What `--feature_map` names: a name of the package, or "window".

    Args:
        name: str.
        far_weight: float, or None: see `keras_performer.FavorPlus`.
    """
    if name == "window":
        return WindowOnly()
    if far_weight is None:
        return name
    feature_map = type(feature_maps.get(name))
    return feature_map(far_weight=far_weight)


class _OptionalParser(flags.ArgumentParser):
    """Reads "none" as None and leaves the rest to another parser."""

    def __init__(self, parser):
        self.parser = parser
        self.syntactic_help = f"none, or {parser.syntactic_help}"

    def parse(self, argument):
        if argument is None or str(argument).lower() == "none":
            return None
        return self.parser.parse(argument)

    def flag_type(self):
        return f"{self.parser.flag_type()} or none"


def _config_flag(field, annotation):
    """Makes the absl flag of one dataclass field, default None."""
    parsers = {
        int: flags.IntegerParser,
        float: flags.FloatParser,
        str: flags.ArgumentParser,
    }
    text = field.metadata["help"]
    if annotation is bool:
        return flags.BooleanFlag(field.name, None, text)
    if field.metadata["choices"]:
        return flags.EnumFlag(
            field.name, None, text, list(field.metadata["choices"])
        )
    if isinstance(annotation, types.UnionType):
        (inner,) = set(typing.get_args(annotation)) - {type(None)}
        parser = _OptionalParser(parsers[inner]())
    else:
        parser = parsers[annotation]()
    return flags.Flag(
        parser, flags.ArgumentSerializer(), field.name, None, text
    )


def define_config_flags(presets, default, flag_values=flags.FLAGS):
    """Defines `--preset` and one flag for each field of the presets.

    Args:
        presets: dict, name -> frozen dataclass with `option` fields. All
            have the same fields: those of their common base class.
        default: name of the preset that holds without `--preset`.
        flag_values: `absl.flags.FlagValues` that receives the flags.
    """
    # The help text stands in the base class; a preset overrides the value.
    base = presets[default].__mro__[1]
    annotations = typing.get_type_hints(base)
    found = [
        flags.EnumFlag(
            "preset", default, "Named setting to start from.", list(presets)
        )
    ]
    for field in dataclasses.fields(base):
        found.append(_config_flag(field, annotations[field.name]))
    for flag in found:
        flags.DEFINE_flag(flag, flag_values)
        # --help lists the flags of the script that runs, not of this module.
        flag_values.register_key_flag_for_module(sys.argv[0], flag)


def config_from_flags(presets, flag_values=flags.FLAGS):
    """The chosen preset with every flag that was given put in.

    Args:
        presets: as in `define_config_flags`.
        flag_values: parsed `absl.flags.FlagValues`.

    Returns:
        An instance of the preset's dataclass.

    Raises:
        UserError: a value is refused by the dataclass.
    """
    preset = presets[flag_values["preset"].value]
    given = {
        field.name: flag_values[field.name].value
        for field in dataclasses.fields(preset)
        if flag_values[field.name].present
    }
    return preset(**given)


def check(config, name, valid, expected):
    """Raises a `UserError` about the field `name` unless `valid`."""
    if not valid:
        raise UserError(
            f"Received an invalid value for argument `{name}`, expected "
            f"{expected}. Received: {name}={getattr(config, name)!r}"
        )


def make_optimizer(
    learning_rate, warmup_steps, total_steps, weight_decay, gradient_clip
):
    """AdamW with linear warm-up, cosine decay and clipping.

    beta_2 = 0.98 and epsilon = 1e-9 are the Performer article's. Weight
    decay leaves out biases, norms and embeddings. Keras does not save that
    choice with the optimizer, so a model that is loaded to be trained
    further needs a new optimizer from here.

    Args:
        learning_rate: float, the peak, reached after `warmup_steps`.
        warmup_steps: int, steps of the linear rise from 0.
        total_steps: int, step at which the rate is a tenth of the peak.
        weight_decay: float.
        gradient_clip: float, largest global norm of the gradient, or None.

    Returns:
        A `keras.optimizers.AdamW`.
    """
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(1, total_steps - warmup_steps),
        alpha=0.1,
    )
    optimizer = keras.optimizers.AdamW(
        schedule,
        weight_decay=weight_decay,
        beta_2=0.98,
        epsilon=1e-9,
        global_clipnorm=gradient_clip,
    )
    optimizer.exclude_from_weight_decay(var_names=list(WITHOUT_DECAY))
    return optimizer


class StopWhenNotFinite(keras.callbacks.Callback):
    """Ends training with a `UserError` at the first loss that is no number.

    `keras.callbacks.TerminateOnNaN` lets the epoch finish: its validation and
    the checkpoint of the broken weights still run. Raising keeps the last
    good checkpoint.
    """

    def on_train_batch_end(self, batch, logs=None):
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            optimizer = self.model.optimizer
            raise UserError(
                f"The loss became {loss} at step {int(optimizer.iterations)}, "
                f"at learning rate {float(optimizer.learning_rate):.3g}. "
                "Lower --learning_rate or raise --warmup_steps. Checkpoints "
                "written before this step are intact."
            )


class CurveLogger(keras.callbacks.Callback):
    """Writes one CSV row after each validation, to compare runs by steps.

    Columns: `step`, `learning_rate`, then what `fit` reports, in its order.

    Args:
        path: file to write; an existing one is replaced.
    """

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_begin(self, logs=None):
        self._rows = 0

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        row = {
            "step": int(optimizer.iterations),
            "learning_rate": float(optimizer.learning_rate),
            **(logs or {}),
        }
        mode = "a" if self._rows else "w"
        with open(self.path, mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if not self._rows:
                writer.writeheader()
            writer.writerow(row)
        self._rows += 1


def training_callbacks(output_dir, monitor):
    """TensorBoard, the two checkpoints, the curve and the guard.

    Args:
        output_dir: existing folder. It receives `tensorboard/<time>/`,
            `best.keras`, `last.keras` and `curve.csv`.
        monitor: name of the validation metric that is best when smallest.

    Returns:
        List of `keras.callbacks.Callback`.
    """
    # A folder per run: TensorBoard would draw two runs as one zigzag.
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return [
        StopWhenNotFinite(),
        keras.callbacks.TensorBoard(
            os.path.join(output_dir, "tensorboard", now), write_graph=False
        ),
        keras.callbacks.ModelCheckpoint(
            os.path.join(output_dir, "best.keras"),
            monitor=monitor,
            mode="min",
            save_best_only=True,
        ),
        keras.callbacks.ModelCheckpoint(
            os.path.join(output_dir, "last.keras")
        ),
        CurveLogger(os.path.join(output_dir, "curve.csv")),
    ]
