"""Publicly reported faults of graphs and compilers, as tests.

Cases O-19, O-20, O-30 and O-52 to O-56.
"""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.layers.dense_oracle import CAUSAL
from tests.layers.dense_oracle import NOT_CAUSAL
from tests.layers.dense_oracle import VARIANTS
from tests.layers.graphs import compiled_shapes
from tests.layers.graphs import graph_shapes
from tests.layers.graphs import larger_than
from tests.layers.graphs import node_count
from tests.layers.graphs import quadratic
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import compiled
from tests.testing import input_gradient
from tests.testing import normal
from tests.testing import to_numpy

if ON_TENSORFLOW:
    import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
causal_variants = pytest.mark.parametrize("name", CAUSAL)
every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_o19_empty_and_single_positions(name):
    layer = VARIANTS[name].attention()
    for mode in ("eager", "graph"):
        function = compiled(layer, mode)
        for batch, length in ((2, 0), (0, 5)):
            output = function(normal(batch, length, 11))
            assert tuple(output.shape) == (batch, length, 11)
        x = normal(2, 1, 11)
        # One key: its value, whatever the kernel makes of it.
        single = VARIANTS[name].output(layer, x)
        assert_close(function(x), single, 1e-5)


@pytest.mark.parametrize("kernel", ["favor", "relu", "exact"])
def test_o19_a_single_position_is_the_same_with_and_without_causality(kernel):
    x = normal(2, 1, 11)
    bidirectional = VARIANTS[kernel].attention()
    causal = VARIANTS[f"{kernel}-causal"].attention()
    bidirectional.build(x.shape)
    causal.build(x.shape)
    causal.set_weights(bidirectional.get_weights())
    assert_close(causal(x), bidirectional(x), 1e-5)


@pytest.mark.tensorflow_only("JAX has no dynamic sizes")
@every_variant
def test_o19_one_dynamic_graph_serves_every_length(name):
    layer = VARIANTS[name].attention()
    layer.build((None, None, 11))
    function = compiled(layer, "graph", [(None, None, 11)])
    gradient = compiled(input_gradient(layer), "graph", [(None, None, 11)] * 2)
    for batch, length in ((2, 1), (3, 2), (2, 3), (1, 17), (2, 0), (0, 5)):
        x, cotangent = normal(2, batch, length, 11)
        assert_close(function(x), layer(x), 1e-5)
        actual = gradient(x, cotangent)
        if length in (0, 1, 17):
            eager = input_gradient(layer)(x, cotangent)
            assert_close(actual, eager, 1e-4)


@pytest.mark.parametrize(
    "name", ["favor-causal", "favor-window", "relu-causal"]
)
@pytest.mark.parametrize("part", ["forward", "gradient"])
def test_o20_the_graph_does_not_grow_with_the_length(name, part):
    layer = VARIANTS[name].attention()
    layer.build((None, None, 11))
    counts = []
    # JAX leaves out the padding where there is none to do.
    for length in (64, 129 if ON_TENSORFLOW else 130, 4096):
        x = np.zeros((2, length, 11), "float32")
        if part == "forward":
            counts.append(node_count(layer, x))
        else:
            counts.append(node_count(input_gradient(layer), x, x))
    assert len(set(counts)) == 1, counts


@causal_variants
def test_o20_a_model_of_dynamic_length_equals_the_static_one(name):
    layer = VARIANTS[name].attention()
    dynamic = keras.Input((None, 11))
    static = keras.Input((13, 11))
    x = normal(2, 13, 11)
    dynamic = keras.Model(dynamic, layer(dynamic))(x)
    static = keras.Model(static, layer(static))(x)
    assert_close(dynamic, static, 1e-6)


# A layer whose tensors of each forbidden kind are larger than all the others.
# Per token: input 11, a projection 2 * 4, all three with the denominator 26;
# features 2 * 96 = 192; states of all chunks 2 * 96 * 5 / 16 = 60; scores of
# a window 2 * 32 = 64. The batch is one.
LENGTH, SMALL, FEATURES, CHUNK = 1024, 32, 96, 16
SHAPE_CASES = {
    "favor-causal": {"chunk_size": CHUNK},
    "favor-window": {"local_window": CHUNK},
    "relu-causal": {"chunk_size": CHUNK},
    "favor": {},
    "relu": {},
}


@pytest.mark.parametrize("stage", [graph_shapes, compiled_shapes])
@pytest.mark.parametrize("name", SHAPE_CASES)
def test_o30_no_forbidden_tensor_is_formed(name, stage):
    layer = VARIANTS[name].attention(
        2, 4, FEATURES, value_dim=4, **SHAPE_CASES[name]
    )
    layer.build((None, None, 11))
    x = np.zeros((1, LENGTH, 11), "float32")
    mask = np.ones((1, LENGTH), bool)
    # The gradient has the forward pass in it.
    shapes = stage(input_gradient(lambda x: layer(x, mask=mask)), x, x)
    # The inspection works: it saw the input itself.
    assert (1, LENGTH, 11) in shapes or (LENGTH, 11) in shapes
    assert not quadratic(shapes, LENGTH)
    if VARIANTS[name].causal:
        assert not larger_than(shapes, SMALL * LENGTH)


@pytest.mark.parametrize("stage", [graph_shapes, compiled_shapes])
def test_o30_the_inspection_finds_what_exact_attention_forms(stage):
    layer = keras.layers.MultiHeadAttention(2, 4)
    layer.build((None, None, 11), (None, None, 11))
    x = np.zeros((1, LENGTH, 11), "float32")
    shapes = stage(lambda x: layer(x, x, use_causal_mask=True), x)
    assert quadratic(shapes, LENGTH)
    assert larger_than(shapes, SMALL * LENGTH)


@pytest.mark.parametrize("stage", [graph_shapes, compiled_shapes])
def test_o30_the_inspection_finds_features_of_all_tokens(stage):
    layer = VARIANTS["favor"].attention(2, 4, FEATURES)
    layer.build((None, None, 11))

    def features(x):
        heads = keras.ops.einsum("blf,fhd->blhd", x, layer.query.kernel)
        w = keras.ops.convert_to_tensor(layer.projection)
        return keras.ops.cumsum(
            keras.ops.exp(keras.ops.einsum("blhd,md->blhm", heads, w)), axis=1
        )

    shapes = stage(features, np.zeros((1, LENGTH, 11), "float32"))
    assert larger_than(shapes, SMALL * LENGTH)


LONG_RUN = """
import numpy as np
from keras_performer.layers import PerformerAttention
from tests.testing import compiled, input_gradient
from tools.benchmark import peak_memory

layer = PerformerAttention(8, 64, num_features=256, causal=True, {kwargs})
layer.build((1, None, 64))
x = np.random.default_rng(0).standard_normal((1, 65536, 64)).astype("float32")
gradient = compiled(input_gradient(layer), {mode!r})(x, x)
assert np.all(np.isfinite(np.asarray(gradient)))
print(peak_memory())
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("kwargs", ["local_window=0", "local_window=128"])
def test_o30_a_long_sequence_needs_little_memory(kwargs, mode):
    # In a process of its own: the peak is the peak of this computation. Loop
    # stacks of a scan hide from a list of shapes, and not from this.
    run = subprocess.run(
        [sys.executable, "-c", LONG_RUN.format(kwargs=kwargs, mode=mode)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) < 4 * 2**30


# XLA compiles anew for every shape, which takes most of the time here.
XLA_VARIANTS = [
    name
    if name in ("favor", "favor-window", "exact")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in VARIANTS
]


@pytest.mark.parametrize("name", XLA_VARIANTS)
def test_o52_compiled_by_xla_for_every_shape(name):
    layer = VARIANTS[name].attention()
    layer.build((None, None, 16))
    gradient = input_gradient(layer)

    def both(x, cotangent):
        return layer(x), gradient(x, cotangent)

    function = compiled(both, "xla", [(None, None, 16)] * 2)
    for shape in ((4, 32, 16), (4, 48, 16), (3, 32, 16)):
        x, cotangent = normal(2, *shape)
        # 1e-4 is the case's.
        for actual, eager in zip(
            function(x, cotangent), both(x, cotangent), strict=True
        ):
            assert_close(actual, eager, 1e-4)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o52_cross_attention_compiled_by_xla(name):
    layer = VARIANTS[name].attention()
    layer.build((None, None, 16), (None, None, 13))
    signature = [(None, None, 16), (None, None, 13)]
    function = compiled(layer, "xla", signature)
    for lengths in ((32, 31), (48, 29), (32, 48)):
        x = normal(3, lengths[0], 16)
        context = normal(3, lengths[1], 13, seed=1)
        assert_close(function(x, context), layer(x, context), 1e-4)


@pytest.mark.tensorflow_only("tf.while_loop is TensorFlow's")
@pytest.mark.parametrize("name", ["favor", "favor-window"])
def test_o53_dropout_inside_a_while_loop(name):
    steps = 20
    block = VARIANTS[name].block(dropout=0.3)
    x = normal(2, 7, 11)
    block.build(x.shape)

    @tf.function
    def loop(x):
        def body(i, outputs):
            y = block(x, training=True)
            return i + 1, outputs.write(i, y)

        outputs = tf.TensorArray("float32", steps, element_shape=x.shape)
        _, outputs = tf.while_loop(
            lambda i, outputs: i < steps, body, [0, outputs]
        )
        return outputs.stack()

    outputs = to_numpy(loop(x)).reshape(steps, -1)
    assert np.all(np.isfinite(outputs))
    # The same input each time: what differs is the dropout mask.
    assert len(np.unique(outputs, axis=0)) == steps


@pytest.mark.tensorflow_only("the report is about tf.function")
@pytest.mark.parametrize(
    ("kind", "name"), [("attention", "favor"), ("block", "favor-window")]
)
def test_o54_no_variable_is_made_after_the_first_call(kind, name):
    layer = getattr(VARIANTS[name], kind)(dropout=0.1)
    function = tf.function(layer)
    function(normal(2, 5, 11), training=False)
    variables = [id(variable) for variable in layer.variables]
    function(normal(3, 7, 11), training=True)
    function(normal(3, 7, 11), mask=np.ones((3, 7), bool), training=True)
    assert [id(variable) for variable in layer.variables] == variables


def stored_tensors(owner, path="layer", seen=None):
    """Attribute paths below a layer that hold a tensor of any kind."""
    seen = set() if seen is None else seen
    if id(owner) in seen:
        return []
    seen.add(id(owner))
    if isinstance(owner, keras.Variable):
        return []
    if keras.ops.is_tensor(owner) or isinstance(owner, keras.KerasTensor):
        return [path]
    if isinstance(owner, dict):
        items = owner.items()
    elif isinstance(owner, (list, tuple, set)):
        items = enumerate(owner)
    elif type(owner).__module__.startswith(("keras_performer", "keras.")):
        # The edges of a functional model hold symbolic tensors by design.
        nodes = ("_inbound_nodes", "_outbound_nodes")
        items = [(k, v) for k, v in vars(owner).items() if k not in nodes]
    else:
        return []
    found = []
    for name, value in items:
        found += stored_tensors(value, f"{path}.{name}", seen)
    return found


def test_o55_the_search_for_tensors_finds_one():
    layer = VARIANTS["favor"].block()
    layer.build((2, 7, 11))
    assert not stored_tensors(layer)
    layer.attention.last_output = [keras.ops.ones((2,))]
    assert stored_tensors(layer)


def check_no_tensor_is_stored(layer):
    inputs = keras.Input((None, 11))
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse")
    x = normal(4, 7, 11)
    model.fit(x, x, batch_size=2, verbose=0)
    model.predict(x, verbose=0)
    assert not stored_tensors(layer)
    return model, x


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("attention", "favor"),
        ("attention", "relu-causal"),
        ("block", "favor-window"),
    ],
)
def test_o55_no_tensor_is_left_on_the_layer(kind, name):
    layer = getattr(VARIANTS[name], kind)(dropout=0.1)
    model, x = check_no_tensor_is_stored(layer)
    assert_close(layer(x), model.predict(x, verbose=0), 1e-5)


@pytest.mark.tensorflow_only("MirroredStrategy is TensorFlow's")
def test_o55_no_tensor_is_left_on_a_replicated_layer(two_replicas):
    with two_replicas.scope():
        layer = VARIANTS["favor-window"].block(dropout=0.1)
        model, x = check_no_tensor_is_stored(layer)
    assert_close(layer(x), model.predict(x, verbose=0), 1e-5)


class Traced(keras.layers.Layer):
    """Counts the traces of the model that it is part of."""

    count = 0

    def call(self, inputs):
        self.count += 1
        return inputs


def counted_model(name):
    inputs = keras.Input((None, 11))
    traced = Traced()
    model = keras.Model(inputs, VARIANTS[name].block()(traced(inputs)))
    traced.count = 0
    return model, traced


@pytest.mark.tensorflow_only("JAX compiles once for each shape, by design")
@pytest.mark.parametrize("name", ["favor", "favor-window"])
def test_o56_fifty_lengths_need_three_traces_at_most(name):
    model, traced = counted_model(name)
    for length in range(1, 51):
        model.predict_on_batch(normal(2, length, 11))
    assert 1 <= traced.count <= 3


@pytest.mark.slow
@pytest.mark.tensorflow_only("JAX compiles once for each shape, by design")
def test_o56_memory_is_flat_over_500_predictions():
    model, _ = counted_model("favor-window")

    def predict(calls):
        for call in range(calls):
            model.predict_on_batch(normal(2, 1 + call % 50, 11))
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    before = predict(100)
    # The case's bound, after the warm-up.
    assert predict(500) - before < 20 * 2**20
