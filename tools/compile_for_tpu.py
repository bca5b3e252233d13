r"""Compiles a model for a TPU that is not there, and tells what it needs.

    python -m tools.compile_for_tpu --topology=v5e:1x1 --length=8192
    python -m tools.compile_for_tpu --model=FILE.keras --length=1024

The compiler is the TPU's own: it comes with `libtpu` and runs on any x86
machine (`pip install '.[tpu-compiler]'`). TensorFlow lowers one step of the
model to StableHLO, and this module hands that to it. It shows whether a TPU
accepts the program, how much memory that takes and how long the compilation;
it runs nothing, and says nothing of numbers or speed.

`--step` is `forward`, `gradient` (of the mean squared output, for the input of
the first layer and all trained weights) or `train_step`: all that Keras does
in one step of `fit`, with Adam, dropout, metrics and redraws.

Without `--model` a stack of `PerformerBlock` is built from the other flags.
"""

import dataclasses
import importlib.metadata
import os
import re
import time

import keras
import numpy as np
from absl import flags
from keras import layers

import keras_performer
from examples import common

# Private parts of jax are used, as they are in these versions.
VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.52"}
TOPOLOGIES = (
    "v2:2x2x1",
    "v3:2x2x1",
    "v4:2x2x1",
    "v5e:1x1",
    "v5e:2x2",
    "v5p:2x2x1",
    "v6e:1x1",
    "tpu7x:2x2x1",
)
STEPS = ("forward", "gradient", "train_step")
DTYPES = ("float32", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler tells of a program.

    Attributes:
        fits: Whether one core's memory holds it.
        seconds: Time of the compilation.
        argument_bytes: High-bandwidth memory of weights and input; `None`,
            as the two below, where the compiler gave up.
        temporary_bytes: The same of everything in between.
        flops: Floating-point operations; the body of a loop counts once.
        message: What the compiler said where it does not fit.
    """

    fits: bool
    seconds: float
    argument_bytes: int | None = None
    temporary_bytes: int | None = None
    flops: float | None = None
    message: str = ""

    def __str__(self):
        verdict = "fits" if self.fits else "does not fit"
        lines = [f"verdict     {verdict}", f"compiled in {self.seconds:.1f} s"]
        for name in ("argument", "temporary"):
            value = getattr(self, name + "_bytes")
            if value is not None:
                lines.append(f"{name:<11} {value / 2**30:.3f} GiB")
        if self.flops is not None:
            lines.append(f"operations  {self.flops:.3g} (loop bodies once)")
        if self.message:
            lines.append(self.message)
        return "\n".join(lines)


def check_versions():
    """Raises a `UserError` where jax or libtpu is missing or another one."""
    for name, expected in VERSIONS.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != expected:
            state = "is not installed" if found is None else f"is {found}"
            raise common.UserError(
                f"Compiling for a TPU needs {name} {expected}; here {name} "
                f"{state}. Try: pip install "
                + " ".join(f"{n}=={v}" for n, v in VERSIONS.items())
            )


def lower(function, *arguments):
    """The StableHLO text of a function of tensors.

    Args:
        function: Takes tensors, and gives tensors; traced here.
        *arguments: Tensors of the shapes and dtypes to compile for.

    Returns:
        str.
    """
    import tensorflow as tf

    function = tf.function(function, jit_compile=True, autograph=False)
    text = function.experimental_get_compiler_ir(*arguments)(stage="stablehlo")
    # An operation of TensorFlow's own dialect, which jax does not know. Both
    # keep the compiler from merging what stands before it with what follows.
    text = text.replace("mhlo.copy %", "stablehlo.optimization_barrier %")
    return _BOOLEANS.sub(_unpacked, text)


# Constants of booleans: TensorFlow's MLIR writes eight to a byte, jax's
# (which is newer) reads one to a byte.
_BOOLEANS = re.compile(r'dense<"0x([0-9A-F]*)"> : tensor<([0-9x]+)xi1>')


def _unpacked(match):
    packed = np.frombuffer(bytes.fromhex(match[1]), np.uint8)
    count = int(np.prod([int(size) for size in match[2].split("x")]))
    if packed.size == count:
        return match[0]
    bits = np.unpackbits(packed, bitorder="little")[:count]
    return f'dense<"0x{bits.tobytes().hex()}"> : tensor<{match[2]}xi1>'


def compile_text(text, topology):
    """Compiles StableHLO for one core of a TPU.

    Args:
        text: str, as `lower` gives it.
        topology: One of `TOPOLOGIES`.

    Returns:
        A `Compiled`.

    Raises:
        UserError: If jax or libtpu is missing, or not of the version that
            this module is written for.
    """
    check_versions()
    # Before the library is loaded: it would look for a TPU and its lock.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    device = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices[0]
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
    )
    start = time.perf_counter()
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        try:
            program = compiler.backend_compile_and_load(
                device.client,
                module,
                xla_client.DeviceList((device,)),
                options,
                [],
            )
        except JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            seconds = time.perf_counter() - start
            return Compiled(False, seconds, message=_first_lines(error))
    seconds = time.perf_counter() - start
    memory = program.get_compiled_memory_stats()
    costs = program.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return Compiled(
        True,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        costs.get("flops"),
    )


def _first_lines(error):
    """The two lines that say how much is needed, of some hundred."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "\n".join([line for line in lines if line][:2])


def build_model(options):
    """A stack of blocks of token ids, or the model of a file."""
    if options.model is not None:
        return keras.saving.load_model(options.model, compile=False)
    x = ids = keras.Input((options.length,), dtype="int32")
    x = layers.Embedding(
        options.vocabulary_size,
        options.width,
        mask_zero=options.masked,
        dtype=options.dtype,
    )(x)
    for _ in range(options.num_layers):
        x = keras_performer.PerformerBlock(
            options.num_heads,
            options.intermediate_dim,
            feature_map=options.feature_map,
            num_features=options.num_features,
            causal=options.causal,
            local_window=options.local_window,
            redraw_interval=options.redraw_interval,
            dropout=options.dropout,
            dtype=options.dtype,
        )(x)
    x = layers.LayerNormalization(dtype=options.dtype)(x)
    return keras.Model(ids, layers.Dense(options.vocabulary_size)(x))


def example_input(model, batch_size, length):
    """Zeros of the shapes that a model takes, sizes left open filled in."""
    import tensorflow as tf

    inputs = model.inputs
    if len(inputs) != 1:
        raise common.UserError(
            f"--model expects a model with one input. Received: {inputs}"
        )
    shape = [batch_size, *inputs[0].shape[1:]]
    shape = [length if size is None else size for size in shape]
    return tf.zeros(shape, inputs[0].dtype)


def step_function(model, step, inputs):
    """One step as a function of tensors, and those tensors.

    Args:
        model: Keras model or layer, built.
        step: One of `STEPS`.
        inputs: Tensor, what the model takes.

    Returns:
        The function, and a tuple of its arguments.
    """
    import tensorflow as tf

    if step == "forward":
        return (lambda x: model(x, training=False)), (inputs,)
    if step == "gradient":

        def gradient(x):
            with tf.GradientTape() as tape:
                sources = list(model.trainable_variables)
                if x.dtype.is_floating:
                    tape.watch(x)
                    sources.append(x)
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            return tape.gradient(loss, sources)

        return gradient, (inputs,)
    targets = tf.zeros(model.compute_output_shape(inputs.shape)[:-1], "int32")
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    model.optimizer.build(model.trainable_variables)
    # Keras makes the metrics' variables at the first batch it sees.
    model._symbolic_build(data_batch=(inputs, targets))
    return (lambda x, y: model.train_step((x, y))), (inputs, targets)


def compile_step(model, step, inputs, topology):
    """Compiles a step of a model for a TPU. See `compile_text`."""
    function, arguments = step_function(model, step, inputs)
    return compile_text(lower(function, *arguments), topology)


def define_flags(flag_values=flags.FLAGS):
    """The command's flags."""
    for define, name, default, text in (
        (flags.DEFINE_string, "model", None, "A `.keras` file."),
        (flags.DEFINE_integer, "batch_size", 1, "Sequences of a core."),
        (flags.DEFINE_integer, "length", 1024, "Tokens."),
        (flags.DEFINE_bool, "causal", True, "Causal attention."),
        (flags.DEFINE_bool, "masked", False, "Whether token 0 is padding."),
        (flags.DEFINE_string, "feature_map", "favor+", "Its name."),
        (flags.DEFINE_integer, "num_features", 256, "M."),
        (flags.DEFINE_integer, "local_window", None, "W."),
        (flags.DEFINE_integer, "redraw_interval", None, "Steps."),
        (flags.DEFINE_integer, "num_layers", 6, "Blocks."),
        (flags.DEFINE_integer, "num_heads", 8, "Heads."),
        (flags.DEFINE_integer, "width", 512, "Width of the model."),
        (flags.DEFINE_integer, "intermediate_dim", 2048, "Of feed-forward."),
        (flags.DEFINE_integer, "vocabulary_size", 257, "Tokens known."),
        (flags.DEFINE_float, "dropout", 0.1, "Rate."),
    ):
        define(name, default, text, flag_values=flag_values)
    for name, default, known, text in (
        ("topology", "v5e:1x1", TOPOLOGIES, "The TPU."),
        ("step", "train_step", STEPS, "What to compile."),
        ("dtype", "float32", DTYPES, "Policy of the blocks."),
    ):
        flags.DEFINE_enum(name, default, known, text, flag_values=flag_values)


def main(options=flags.FLAGS):
    """Compiles, and prints what the compiler says."""
    check_versions()  # now, and not after minutes of building
    model = build_model(options)
    inputs = example_input(model, options.batch_size, options.length)
    print(
        f"{options.step} of {model.count_params():,} weights, input "
        f"{tuple(inputs.shape)}, for {options.topology}"
    )
    print(compile_step(model, options.step, inputs, options.topology))


if __name__ == "__main__":
    define_flags()
    common.run(main)
