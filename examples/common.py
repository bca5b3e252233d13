"""What the pipelines share: flags, model, strategies, training and errors.

A preset is a frozen dataclass. Every field of it is a flag of the same name,
so `--preset=small --num_layers=2` is the `small` preset with one change.
"""

import csv
import dataclasses
import datetime
import json
import logging
import math
import os
import shutil
import sys
import time
import types
import typing

import keras
import numpy as np
import tensorflow as tf
from absl import app
from absl import flags
from absl import logging as absl_logging

from examples.backup import Backup
from examples.backup import differing
from examples.errors import UserError
from examples.records import TFDS
from keras_performer import FeatureMap
from keras_performer import PerformerLM
from keras_performer import callbacks as performer_callbacks
from keras_performer import feature_maps
from keras_performer import saving
from keras_performer.feature_maps import Exact

BACKUP = "backup.npz"
CHECKPOINTS = ("best.keras", "last.keras")
DISTRIBUTIONS = ("none", "mirrored", "tpu")
WITH_FAR_WEIGHT = ("favor+", "favor++", "favor#", "hedgehog")
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


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """A model of Performer blocks and its training: what all tasks share.

    Attributes:
        causal: Whether a token sees only itself and those before.

    Raises:
        UserError: a value makes no sense; the message names the field.
    """

    causal = True

    batch_size: int = option(8, "Sequences in a step, over all replicas.")
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
    redraw_interval: int | None = option(
        None, "Steps between new projections; none: the first is kept."
    )
    dropout: float = option(0.0, "Dropout rate in the blocks.")
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
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    )
    distribution: str = option(
        "none",
        "mirrored: over all GPUs, or else all logical CPUs; tpu: over the "
        "cores of the TPU of this machine.",
        choices=DISTRIBUTIONS,
    )
    seed: int = option(0, "Seed of weights, projections and data order.")

    def __post_init__(self):
        counts = (
            "batch_size num_layers num_heads hidden_dim intermediate_dim "
            "num_features steps validation_every"
        )
        for name in counts.split():
            check(self, name, getattr(self, name) > 0, "a positive integer")
        for name in ("warmup_steps", "weight_decay", "seed"):
            check(
                self, name, 0 <= getattr(self, name) < math.inf, "at least 0"
            )
        check(self, "seed", self.seed < 2**31, "less than 2**31")
        check(
            self,
            "learning_rate",
            0 < self.learning_rate < math.inf,
            "a number above 0",
        )
        check(self, "dropout", 0 <= self.dropout < 1, "0 <= rate < 1")
        check(
            self,
            "far_weight",
            self.far_weight is None or self.feature_map in WITH_FAR_WEIGHT,
            f"none unless feature_map is one of {WITH_FAR_WEIGHT}",
        )
        near = self.causal and self.local_window != 0
        for name, used in (
            ("far_weight", self.far_weight is not None),
            ("feature_map", self.feature_map == "window"),
        ):
            check(
                self,
                name,
                near or not used,
                "another where attention has no exact window beside the "
                "features (in a masked task, and with local_window=0)",
            )
        optional = (
            "validation_batches gradient_clip far_weight redraw_interval"
        )
        for name in optional.split():
            value = getattr(self, name)
            check(
                self,
                name,
                value is None or 0 < value < math.inf,
                "a number above 0, or none",
            )
        check(
            self,
            "hidden_dim",
            self.hidden_dim % self.num_heads == 0,
            f"a multiple of num_heads={self.num_heads}",
        )
        check(
            self,
            "steps",
            self.steps % self.validation_every == 0,
            f"a multiple of validation_every={self.validation_every}",
        )
        alone = self.distribution == "none"
        check(
            self,
            "jit_compile",
            alone or not self.jit_compile,
            "false with replicas (--nojit_compile): a TPU compiles in any "
            "case, and Keras would hand the variables of several devices to "
            "one program",
        )
        check(
            self,
            "dtype_policy",
            alone or self.dtype_policy != "mixed_float16",
            "float32 or mixed_bfloat16 with replicas, of which one alone "
            "would decide whether a step of float16 is skipped",
        )


def claim_folder(config, data_dir, output_dir):
    """Makes the folder of a run, and sees that no other run's is lost.

    Args:
        config: `TrainingConfig`.
        data_dir: string, where the data come from, or None.
        output_dir: folder, made if it is missing. Receives `config.json`.

    Raises:
        UserError: it holds the models, or the backup, of a run with other
            settings.
    """
    os.makedirs(output_dir, exist_ok=True)
    settings = _settings(config, data_dir)
    path = os.path.join(output_dir, "config.json")
    if holds(output_dir, BACKUP):
        Backup(os.path.join(output_dir, BACKUP), settings).check()
    elif holds(output_dir, *CHECKPOINTS):
        changed = "program"
        if os.path.exists(path):
            changed = differing(settings, _read_settings(output_dir))
        if changed:
            raise UserError(
                f"{output_dir} holds the models of a run with another "
                f"{changed}. Give this run another --output_dir, or delete "
                "that folder."
            )
    with open(path, "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2)
        file.write("\n")


def holds(folder, *names):
    """Whether a folder holds a file of any of these names."""
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def read_config(kind, folder):
    """The config of the class `kind` of the run that `folder` is of.

    Raises:
        UserError: there is none, or it is another program's.
    """
    settings = _read_settings(folder)
    settings.pop("data_dir", None)
    try:
        return kind(**settings)
    except TypeError as error:
        raise _no_config(folder, error) from error


def _settings(config, data_dir):
    """Dict of all that makes a run what it is."""
    if data_dir is not None and not data_dir.startswith(TFDS):
        data_dir = os.path.abspath(data_dir)
    return {**dataclasses.asdict(config), "data_dir": data_dir}


def evaluation_data_dir(given, folder, embedded, verbose=1):
    """Where data come from.

    Args:
        given: string of `--data_dir`; None: as in the training.
        folder: of the run.
        embedded: string, what to call the data that the example brings.
        verbose: 1 prints it, 0 nothing.

    Returns:
        string, or None for the embedded data.

    Raises:
        UserError: the data of the training are not there.
    """
    if given is None:
        given = _read_settings(folder).get("data_dir")
        here = given is None or given.startswith(TFDS)
        if not here and not os.path.exists(given):
            raise UserError(
                f"--data_dir: expected where the data are, as the {given} of "
                "the training is not there."
            )
    if verbose:
        print(f"data: {given or embedded}")
    return given


def _read_settings(folder):
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
        return {**settings}
    except FileNotFoundError:
        raise UserError(
            "The training command writes config.json beside its models; "
            f"there is none at {path}."
        ) from None
    except (TypeError, ValueError) as error:
        raise _no_config(folder, error) from error


def _no_config(folder, error):
    return UserError(
        f"{os.path.join(folder, 'config.json')} was not written by the "
        f"training command of this example: {error}"
    )


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


def build_model(config, vocabulary_size, sequence_length, **options):
    """The model of a config: ids `[B, L]` int32 -> logits `[B, L, V]`.

    Args:
        config: `TrainingConfig`.
        vocabulary_size: int, V.
        sequence_length: int, longest sequence of learned positions.
        **options: arguments of `keras_performer.PerformerLM` that are no
            fields of the config.

    Returns:
        A `keras_performer.PerformerLM`.

    Raises:
        UserError: a layer refuses a value of the config.
    """
    try:
        return PerformerLM(
            vocabulary_size,
            config.num_layers,
            config.num_heads,
            config.hidden_dim,
            config.intermediate_dim,
            sequence_length,
            feature_map=get_feature_map(config.feature_map, config.far_weight),
            num_features=config.num_features,
            local_window=config.local_window,
            redraw_interval=config.redraw_interval,
            dropout=config.dropout,
            seed=config.seed,
            dtype=config.dtype_policy,
            **options,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"The model cannot be built. {error}") from error


@keras.saving.register_keras_serializable(package="keras_performer_examples")
class TokenLoss(keras.losses.Loss):
    """Mean cross-entropy of tokens, weighted, over the whole batch.

    Padding has weight 0 and does not dilute the mean, as with Keras's
    `reduction="mean_with_sample_weight"`. That divides by the weights of each
    replica: replicas with much padding then count as much as others, and the
    gradient is not that of one device. Here it is.
    """

    def __init__(self, name="token_loss", **kwargs):
        super().__init__(name=name, **kwargs)

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Ids `[B, L]`, logits `[B, L, V]`, weights `[B, L]` -> scalar."""
        nats = self.call(y_true, y_pred)
        weight = keras.ops.ones_like(nats)
        if sample_weight is not None:
            weight = keras.ops.cast(sample_weight, nats.dtype)
        total = keras.ops.sum(weight)
        replica = tf.distribute.get_replica_context()
        if replica is not None and replica.num_replicas_in_sync > 1:
            # Keras adds up the replicas' losses and gradients.
            total = replica.all_reduce("sum", total)
        return keras.ops.divide_no_nan(keras.ops.sum(nats * weight), total)

    def call(self, y_true, y_pred):
        return token_nats(y_true, y_pred)


def token_nats(y_true, logits):
    """-log p of each token: ids `[B, L]`, logits `[B, L, V]` -> `[B, L]`."""
    return keras.ops.sparse_categorical_crossentropy(
        y_true, keras.ops.cast(logits, "float32"), from_logits=True
    )


def compile_model(model, config, metrics):
    """Cross-entropy, AdamW and metrics, as the config says.

    Args:
        model: gives logits `[B, L, V]`.
        config: `TrainingConfig`.
        metrics: list of metrics; they and the loss are weighted.
    """
    model.compile(
        optimizer=make_optimizer(
            config.learning_rate,
            config.warmup_steps,
            config.steps,
            config.weight_decay,
            config.gradient_clip,
        ),
        loss=TokenLoss(),
        weighted_metrics=metrics,
        jit_compile=config.jit_compile,
    )


def same_each_time(make):
    """A data set whose iterators all begin with the same random numbers.

    Seeded shuffles and draws of a `tf.data.Dataset` go on from one of its
    iterators to the next, and `fit` may look inside before it begins.

    Args:
        make: function of a scalar, which it ignores, to a `tf.data.Dataset`.
    """
    return tf.data.Dataset.range(1).flat_map(make)


def make_strategy(config):
    """The strategy that `--distribution` names.

    Models are built and compiled in its `scope()`; `fit` does the rest.

    Args:
        config: `TrainingConfig`.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        UserError: "tpu", and there is none on this machine; or the batch
            cannot be divided among the replicas.
    """
    strategy = _strategy(config.distribution)
    replicas = strategy.num_replicas_in_sync
    check(
        config,
        "batch_size",
        config.batch_size % replicas == 0,
        f"a multiple of the {replicas} replicas",
    )
    return strategy


def _strategy(name):
    if name == "none":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        devices = tf.config.list_logical_devices("GPU")
        devices = devices or tf.config.list_logical_devices("CPU")
        return tf.distribute.MirroredStrategy([d.name for d in devices])
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu="local"
        )
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise UserError(
            "--distribution=tpu: TensorFlow finds no TPU on this machine. It "
            "needs one, and the TPU build of TensorFlow: pip install "
            f'"keras-performer[tpu]". ({str(error).splitlines()[0]})'
        ) from error


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


def printable(path):
    """A path in which bytes that are not UTF-8 are spelled out."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check(config, name, valid, expected):
    """Raises a `UserError` about the field `name` unless `valid`."""
    if not valid:
        raise UserError(
            f"Received an invalid value for argument `{name}`, expected "
            f"{expected}. Received: {name}={getattr(config, name)!r}"
        )


@keras.saving.register_keras_serializable(package="keras_performer_examples")
class AdamW(keras.optimizers.AdamW):
    """AdamW that clips by the norm of the gradient of the whole batch.

    Keras clips the gradient of each replica, and adds up afterwards.
    """

    def _clip_gradients(self, grads):
        # A table's gradient names a row as often as it was read: a norm of
        # that would not be the gradient's.
        grads = [tf.convert_to_tensor(gradient) for gradient in grads]
        replica = tf.distribute.get_replica_context()
        count = 1 if replica is None else replica.num_replicas_in_sync
        if count == 1:
            return super()._clip_gradients(grads)
        clipped = super()._clip_gradients(replica.all_reduce("sum", grads))
        # Keras adds up what the replicas give.
        return [gradient / count for gradient in clipped]


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
        An `AdamW`.
    """
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(1, total_steps - warmup_steps),
        alpha=0.1,
    )
    optimizer = AdamW(
        schedule,
        weight_decay=weight_decay,
        beta_2=0.98,
        epsilon=1e-9,
        global_clipnorm=gradient_clip,
    )
    optimizer.exclude_from_weight_decay(var_names=list(WITHOUT_DECAY))
    return optimizer


def steps_done(optimizer):
    """Steps that an optimizer has taken; a plain int() fails on replicas."""
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


class StopWhenNotFinite(keras.callbacks.Callback):
    """Ends training with a `UserError` at the first loss that is no number.

    `keras.callbacks.TerminateOnNaN` lets the epoch finish: its validation and
    the checkpoint of the broken weights still run. Raising keeps the last
    good checkpoint.
    """

    def on_train_batch_end(self, batch, logs=None):
        self._check((logs or {}).get("loss", 0.0))

    def on_epoch_end(self, epoch, logs=None):
        # The last update, before a checkpoint keeps what it made.
        self._check((logs or {}).get("val_loss", 0.0))

    def _check(self, loss):
        if not math.isfinite(loss):
            optimizer = self.model.optimizer
            raise UserError(
                f"The loss became {loss} at step {steps_done(optimizer)}, "
                f"at learning rate {float(optimizer.learning_rate):.3g}. "
                "Lower --learning_rate or raise --warmup_steps. Checkpoints "
                "written before this step are intact."
            )


class CurveLogger(keras.callbacks.Callback):
    """Writes one CSV row after each validation, to compare runs by steps.

    Columns: `step`, `learning_rate`, then what `fit` reports, in its order.

    Args:
        path: file to write.
        done: int, rows of an existing file that are kept.

    Attributes:
        rows: list of dicts, the rows so far.
    """

    def __init__(self, path, done=0):
        super().__init__()
        self.path = path
        self.rows = []
        if done:
            with open(path, newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))[:done]

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        row = {
            "step": steps_done(optimizer),
            "learning_rate": float(optimizer.learning_rate),
            **(logs or {}),
        }
        self.rows.append(row)
        # Whole, and at once: a process may be killed at any time.
        with open(self.path + ".new", "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, fieldnames=list(row))
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(self.path + ".new", self.path)


class Throughput(keras.callbacks.Callback):
    """Adds `tokens_per_second` of training to what an epoch reports.

    Args:
        tokens: int, tokens in a step.
    """

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def on_epoch_begin(self, epoch, logs=None):
        self._start = self._end = time.monotonic()
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        # Validation, which comes before the end of an epoch, does not count.
        self._end = time.monotonic()
        self._steps = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        seconds = max(self._end - self._start, 1e-9)
        logs["tokens_per_second"] = self.tokens * self._steps / seconds


class Samples(keras.callbacks.Callback):
    """Writes what the model makes to TensorBoard after each epoch.

    Args:
        log_dir: folder of the TensorBoard run.
        write: function of the model that calls `tf.summary`.
    """

    def __init__(self, log_dir, write):
        super().__init__()
        self.log_dir = log_dir
        self.write = write

    def on_epoch_end(self, epoch, logs=None):
        with tf.summary.create_file_writer(self.log_dir).as_default(epoch):
            self.write(self.model)


def fit(
    model,
    config,
    training,
    validation,
    output_dir,
    monitor,
    data_dir=None,
    sample=None,
    verbose="auto",
):
    """Trains a compiled model, from where an earlier run was cut off.

    Args:
        model: compiled model of ids `[batch_size, L]`.
        config: `TrainingConfig`.
        training: function of a number of steps: an endless `tf.data.Dataset`
            of batches without so many of its first ones.
        validation: `tf.data.Dataset`, whole.
        output_dir: folder that `claim_folder` made. Receives `curve.csv`,
            `best.keras`, `last.keras`, `tensorboard/`, and `backup.npz`
            until `finish`.
        monitor: name of the validation metric that is best when smallest.
        data_dir: string, where the data come from, or None. A run is not
            continued with others.
        sample: function of the model that calls `tf.summary` with what it
            makes, or None. Not called on a TPU, for whose host TensorFlow
            cannot compile the loop of `generate`; the approximation is not
            monitored there either.
        verbose: as in `keras.Model.fit`.

    Returns:
        The model with the weights of the best validation; where replicas
        trained it, a new one on one device.

    Raises:
        UserError: the loss is no number, or the folder holds the backup of
            another run.
    """
    backup = Backup(
        os.path.join(output_dir, BACKUP),
        _settings(config, data_dir),
    )
    with model.distribute_strategy.scope():  # makes the optimizer's variables
        done = backup.restore(model)
    if done:
        print(f"continuing after step {done * config.validation_every:,}")
    else:
        _forget(output_dir)
    probe = None
    if config.distribution == "tpu":
        sample = None
    else:
        probe = _probe(model, validation)
    epochs = config.steps // config.validation_every
    if done < epochs:
        dataset = training(done * config.validation_every)
        tokens = math.prod(dataset.element_spec[0].shape)
        model.fit(
            dataset,
            initial_epoch=done,
            epochs=epochs,
            steps_per_epoch=config.validation_every,
            validation_data=validation,
            callbacks=[
                Throughput(tokens),
                *training_callbacks(output_dir, monitor, done, sample, probe),
                backup,
            ],
            shuffle=False,  # the data set does it
            verbose=verbose,
        )
    best = os.path.join(output_dir, CHECKPOINTS[0])
    if config.distribution != "none":
        # On one device, where all else may be done with it.
        return keras.saving.load_model(best, compile=False)
    model.load_weights(best)
    return model


def _forget(folder):
    """Deletes a finished run's models: they would pass for the new run's."""
    for name in CHECKPOINTS:
        if holds(folder, name):
            os.remove(os.path.join(folder, name))
    shutil.rmtree(os.path.join(folder, "saved_model"), ignore_errors=True)


def load_model(path, state_for=None):
    """A `.keras` file or an exported SavedModel folder as a callable.

    Args:
        path: string.
        state_for: name of the flag that needs a model which continues a
            sequence from a state, or None.

    Raises:
        UserError: it is neither, or has no state.
    """
    model = _load_model(path)
    if state_for is not None:
        exact = isinstance(getattr(model, "feature_map", None), Exact)
        if exact or not isinstance(model, PerformerLM):
            raise UserError(
                f"{state_for}: expected the .keras file of a model that "
                "carries a state, not of exact attention. Received: "
                f"{path}"
            )
    return model


def _load_model(path):
    if os.path.isdir(path):
        try:
            return saving.load_saved_model(path)
        except (OSError, ValueError) as error:
            raise UserError(f"--model: {error}") from error
    if not os.path.isfile(path):
        raise UserError(f"--model: there is no file or folder {path}")
    if not path.endswith(".keras"):
        raise UserError(
            "--model: expected a .keras file or the folder of a SavedModel. "
            f"Received: {path}"
        )
    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:  # zipfile, h5py, json: each has its own
        raise UserError(f"--model: cannot load {path}: {error}") from error


def define_evaluation_flags(
    splits, data_help, split_help, flag_values=flags.FLAGS
):
    """Defines `--model`, `--data_dir` and `--split`.

    Args:
        splits: tuple of strings.
        data_help: string, help of `--data_dir`.
        split_help: string, help of `--split`.
        flag_values: `absl.flags.FlagValues` that receives the flags.
    """
    flags.DEFINE_string(
        "model",
        None,
        "A .keras file or an exported SavedModel folder.",
        flag_values=flag_values,
        required=True,
    )
    flags.DEFINE_string("data_dir", None, data_help, flag_values=flag_values)
    flags.DEFINE_enum(
        "split", "validation", splits, split_help, flag_values=flag_values
    )


def export(model, example, output_dir):
    """Exports a SavedModel, reloads it and tells how predictions differ.

    Args:
        model: the trained model.
        example: ids `[B, L]`, of which the first row is predicted.
        output_dir: folder that receives `saved_model/`.

    Returns:
        The path of the SavedModel.
    """
    path = os.path.join(output_dir, "saved_model")
    saving.export_saved_model(model, path)
    reloaded = saving.load_saved_model(path)
    row = example[:1]
    difference = float(np.max(np.abs(model(row) - reloaded(row))))
    print(
        f"\nSavedModel: {path}\n"
        f"reloaded, largest difference of a logit: {difference:.2g}"
    )
    return path


def draw_curve(output_dir, metric, label):
    """Draws `curve.png` from the `curve.csv` of a run: training, validation.

    Args:
        output_dir: folder of the run.
        metric: name of a column; its validation is in `val_<metric>`.
        label: string beside the axis.
    """
    # Without pyplot, which would choose a window system for the process.
    from matplotlib.figure import Figure

    path = os.path.join(output_dir, "curve.csv")
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = [int(row["step"]) for row in rows]
    for column, name in ((metric, "training"), (f"val_{metric}", "validation")):
        values = [float(row[column]) for row in rows]
        axes.plot(steps, values, marker=".", label=name)
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(os.path.join(output_dir, "curve.png"), dpi=150)


def scores_here(config):
    """Whether the whole validation split is scored after training.

    Not where a TPU trained: its host would take hours. Prints what to do.
    """
    if config.distribution != "tpu":
        return True
    print(
        "\nThe validations during training are in curve.csv. To score the "
        "whole split, copy the folder to another machine and run the "
        "evaluate command of this example on best.keras."
    )
    return False


def finish(output_dir):
    """Deletes the backup: the run is over, the same command starts anew."""
    if holds(output_dir, BACKUP):
        os.remove(os.path.join(output_dir, BACKUP))


# What exact attention of a probe may take.
PROBE_TOKENS = 1024


def _probe(model, validation):
    """A sequence for the approximation monitor; None: nothing to monitor."""
    feature_map = feature_maps.serialize(model.feature_map)["class_name"]
    if feature_map in ("Exact", "WindowOnly"):
        return None
    for batch in validation.take(1):
        return batch[0][:1, :PROBE_TOKENS]


def training_callbacks(output_dir, monitor, done=0, sample=None, probe=None):
    """TensorBoard, the two checkpoints, the curve and the guard.

    Args:
        output_dir: existing folder. It receives `tensorboard/<time>/`,
            `best.keras`, `last.keras` and `curve.csv`.
        monitor: name of the validation metric that is best when smallest.
        done: int, epochs of an earlier run that this one continues.
        sample: see `fit`.
        probe: ids `[1, L]` for a
            `keras_performer.callbacks.ApproximationMonitor`, or None.

    Returns:
        List of `keras.callbacks.Callback`.
    """
    # A folder per run: TensorBoard would draw two runs as one zigzag.
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    log_dir = os.path.join(output_dir, "tensorboard", now)
    curve = CurveLogger(os.path.join(output_dir, "curve.csv"), done)
    before = [float(row[monitor]) for row in curve.rows]
    best, last = (os.path.join(output_dir, name) for name in CHECKPOINTS)
    found = [
        StopWhenNotFinite(),
        keras.callbacks.TensorBoard(log_dir, write_graph=False),
        keras.callbacks.ModelCheckpoint(
            best,
            monitor=monitor,
            mode="min",
            save_best_only=True,
            initial_value_threshold=min(before, default=None),
        ),
        keras.callbacks.ModelCheckpoint(last),
        curve,
    ]
    if sample is not None:
        found.append(Samples(os.path.join(log_dir, "samples"), sample))
    if probe is not None:
        # After the others: its many values are for TensorBoard alone.
        found.append(
            performer_callbacks.ApproximationMonitor(
                probe, os.path.join(log_dir, "approximation")
            )
        )
    return found
