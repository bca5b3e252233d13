"""The compiler of a TPU takes the package's programs, and refuses others.

The tests marked `tpu` need libtpu, but no TPU: `pip install
'.[tpu-compiler]'`. The others look at what stands around the compiler.
"""

import functools
import importlib.metadata

import keras
import numpy as np
import pytest
from absl import flags

import keras_performer
from examples import common
from tools import compile_for_tpu

pytestmark = pytest.mark.tensorflow_only("programs are lowered by TensorFlow")

GIGABYTE = 10**9


def options_of(*arguments):
    values = flags.FlagValues()
    compile_for_tpu.define_flags(values)
    values(["tool", *arguments])
    return values


SMALL = (
    "--num_layers=1",
    "--num_heads=2",
    "--width=16",
    "--intermediate_dim=32",
    "--num_features=64",
    "--length=384",
    "--batch_size=2",
    "--vocabulary_size=31",
    "--redraw_interval=5",
    "--masked",
)


@functools.cache
def train_step(causal, dtype):
    """StableHLO of a train step with dropout, masks and a redraw."""
    options = options_of(*SMALL, f"--causal={causal}", f"--dtype={dtype}")
    model = compile_for_tpu.build_model(options)
    inputs = compile_for_tpu.example_input(model, 2, 384)
    step, arguments = compile_for_tpu.step_function(
        model, "train_step", inputs
    )
    return compile_for_tpu.lower(step, *arguments)


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v2:2x2x1", "v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_train_step_compiles(dtype, causal, topology):
    compiled = compile_for_tpu.compile_text(
        train_step(causal, dtype), topology
    )
    assert compiled.fits
    assert compiled.argument_bytes > 0
    assert compiled.temporary_bytes > 0
    assert compiled.flops > 0


def gradient_of(layer, length, topology="v5e:1x1"):
    """Compiles the gradient of a layer, d=128, for one core."""
    x = keras.Input((length, 128))
    model = keras.Model(x, layer(x))
    inputs = compile_for_tpu.example_input(model, 1, length)
    return compile_for_tpu.compile_step(model, "gradient", inputs, topology)


@pytest.mark.tpu
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_take_linear_memory(causal):
    def temporaries(length, topology):
        layer = keras_performer.PerformerAttention(8, 16, causal=causal)
        compiled = gradient_of(layer, length, topology)
        assert compiled.fits
        return compiled.temporary_bytes

    assert temporaries(65536, "v5e:1x1") < GIGABYTE
    # On a v2, whose vector memory is small: elsewhere short sequences partly
    # fit into it, and what lies there is not counted. What does not depend on
    # the length makes the ratio smaller than 2, and whole tiles larger.
    once = temporaries(65536, "v2:2x2x1")
    assert temporaries(131072, "v2:2x2x1") <= 2.1 * once


class SelfAttention(keras.layers.Layer):
    """`keras.layers.MultiHeadAttention` of one tensor."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(8, 16)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


@pytest.mark.tpu
def test_exact_attention_of_long_sequences_is_refused():
    compiled = gradient_of(SelfAttention(), 65536)
    assert not compiled.fits
    assert compiled.temporary_bytes is None
    assert "does not fit" in str(compiled)
    # How much is needed, and how much is there.
    assert "15.75G" in compiled.message


@pytest.mark.tpu
def test_the_command_tells_what_a_saved_model_needs(tmp_path, capsys):
    model = compile_for_tpu.build_model(options_of(*SMALL))
    path = str(tmp_path / "model.keras")
    model.save(path)
    compile_for_tpu.main(
        options_of(f"--model={path}", "--step=forward", "--length=384")
    )
    text = capsys.readouterr().out
    assert "input (1, 384), for v5e:1x1" in text
    assert "verdict     fits" in text


@pytest.mark.parametrize(
    "argument", ["--topology=v9:1x1", "--step=backward", "--dtype=float8"]
)
def test_a_wrong_flag_is_named(argument):
    with pytest.raises(flags.IllegalFlagValueError, match=argument):
        options_of(argument)


@pytest.mark.parametrize(
    "installed, state",
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, "libtpu is not installed"),
        ({"jax": "0.9.0", "jaxlib": "0.9.0"}, "jax is 0.9.0"),
    ],
)
def test_missing_and_other_versions_are_named(installed, state, monkeypatch):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(common.UserError, match=f"{state}. Try: pip install"):
        compile_for_tpu.main(options_of())


def test_boolean_constants_are_written_a_byte_each():
    import tensorflow as tf

    # More than a hundred elements: fewer are written as a list of words.
    pattern = np.random.default_rng(0).random((13, 11)) < 0.5

    def function(x):
        return tf.where(tf.constant(pattern), x, -x)

    text = compile_for_tpu.lower(function, tf.zeros((13, 11)))
    expected = pattern.astype("uint8").tobytes().hex()
    assert f'dense<"0x{expected}"> : tensor<13x11xi1>' in text


@pytest.mark.parametrize("step", compile_for_tpu.STEPS)
def test_steps_are_lowered_with_their_weights(step):
    model = compile_for_tpu.build_model(options_of(*SMALL))
    inputs = compile_for_tpu.example_input(model, 2, 384)
    function, arguments = compile_for_tpu.step_function(model, step, inputs)
    text = compile_for_tpu.lower(function, *arguments)
    # The embedding's table enters as an argument, and is no constant.
    signature = next(line for line in text.splitlines() if "@main" in line)
    assert "tensor<31x16xf32>" in signature
    assert ("stablehlo.rng_bit_generator" in text) == (step != "forward")


def test_a_model_of_several_inputs_is_refused():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    model = keras.Model(inputs, keras.layers.Add()(inputs))
    with pytest.raises(common.UserError, match="a model with one input"):
        compile_for_tpu.example_input(model, 1, 8)
