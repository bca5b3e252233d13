"""Memory and graph size of attention, forward and gradient."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest

from keras_performer import feature_maps
from keras_performer import ops
from tests.layers.graphs import compiled_shapes
from tests.layers.graphs import larger_than
from tests.layers.graphs import node_count
from tests.layers.graphs import quadratic
from tests.testing import ON_TENSORFLOW

HEADS, DIM, FEATURES, CHUNK = 2, 64, 256, 128
ROOT = pathlib.Path(__file__).parents[2]


def gradients(attend, length):
    """Function of (q, k, v) to their gradients, and such arrays."""
    feature_map = feature_maps.get("favor+")
    projection = feature_map.draw_projection(FEATURES, DIM, seed=1)
    arrays = np.zeros((3, 1, length, HEADS, DIM), "float32")

    def loss(q, k, v):
        output = attend(q, k, v, feature_map, projection)
        return keras.ops.sum(keras.ops.square(output))

    if ON_TENSORFLOW:
        import tensorflow as tf

        def function(q, k, v):
            with tf.GradientTape() as tape:
                tape.watch((q, k, v))
                value = loss(q, k, v)
            return tape.gradient(value, (q, k, v))

        return function, tuple(tf.constant(x) for x in arrays)
    import jax

    return jax.grad(loss, argnums=(0, 1, 2)), tuple(arrays)


def causal(window):
    def attend(q, k, v, feature_map, projection):
        return ops.causal_kernel_attention(
            q,
            k,
            v,
            feature_map=feature_map,
            projection=projection,
            local_window=window,
        )

    return attend


def bidirectional(q, k, v, feature_map, projection):
    return ops.kernel_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        projection=projection,
        chunk_size=CHUNK,
    )


def exact(q, k, v, feature_map, projection):
    return ops.exact_attention(q, k, v, causal=True)


def at_once(q, k, v, feature_map, projection):
    """All features are formed, which is what the others must not do."""
    features = (
        keras.ops.exp(feature_map(x, projection, is_query))
        for x, is_query in ((q, True), (k, False))
    )
    return ops.linear_attention(*features, v)


ATTENTION = {
    "causal": causal(0),
    "window": causal(CHUNK),
    "bidirectional": bidirectional,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_o30_nothing_large_is_ever_stored(name):
    length = 8192
    function, arrays = gradients(ATTENTION[name], length)
    shapes = compiled_shapes(function, *arrays)
    assert any(np.prod(s) >= length * DIM for s in shapes)  # it looked
    assert not quadratic(shapes, length)
    # Of the forbidden ones the smallest: a state for each chunk, (L / C) M E.
    # L x M has twice its size, L x M x E much more.
    limit = HEADS * (length // CHUNK) * FEATURES * DIM
    assert not larger_than(shapes, limit - 1)


@pytest.mark.parametrize("attend", [at_once, exact])
def test_the_check_of_memory_can_fail(attend):
    length = 2048
    function, arrays = gradients(attend, length)
    shapes = compiled_shapes(function, *arrays)
    limit = HEADS * (length // CHUNK) * FEATURES * DIM
    assert larger_than(shapes, limit - 1)
    assert bool(quadratic(shapes, length)) == (attend is exact)


@pytest.mark.tensorflow_only("XLA's plan of the loops that TensorFlow makes")
def test_a_loop_holds_no_copies_and_later_loops_hold_nothing_yet():
    import tensorflow as tf

    # With the window: 8 blocks of 128, widths 64 and 65 (with the ones).
    function, arrays = gradients(ATTENTION["window"], 1024)
    function = tf.function(function, jit_compile=True, autograph=False)
    text = function.experimental_get_compiler_ir(*arrays)("optimized_hlo")
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :]
    before, loop = re.split(r"(?= while\()", entry)[0].rsplit("\n", 1)
    blocks = rf"f32\[8,1,{HEADS},128,6[45]\]"
    # Query, key, values and output; blocks before are elements of them.
    assert len(re.findall(blocks, loop)) == 4
    # Each of the three transposed, and copied for it; the output's memory.
    # That of the seven gradients is not set aside until their loops begin.
    assert len(re.findall(rf"= {blocks}", before)) <= 7


@pytest.mark.parametrize("name", ATTENTION)
def test_o20_the_graph_does_not_grow_with_the_length(name):
    # JAX leaves out the padding where there is none to do.
    lengths = (64, 129, 300, 4096) if ON_TENSORFLOW else (300, 1000, 4097)
    counts = {
        node_count(*_flat(gradients(ATTENTION[name], length)))
        for length in lengths
    }
    assert len(counts) == 1, counts


def _flat(pair):
    function, arrays = pair
    return (function, *arrays)


LONG = """
    import keras
    import tensorflow as tf
    from keras_performer import feature_maps, ops
    from tools.benchmark import peak_memory
    feature_map = feature_maps.get("favor+")
    projection = feature_map.draw_projection(256, 64, seed=1)

    @tf.function(jit_compile=True)
    def step(q, k, v):
        with tf.GradientTape() as tape:
            tape.watch((q, k, v))
            output = ops.causal_kernel_attention(
                q, k, v, feature_map=feature_map, projection=projection,
                local_window={window})
            loss = tf.reduce_sum(tf.square(output))
        return tape.gradient(loss, (q, k, v))

    size = (1, 65536, 8, 64)
    q, k, v = (keras.random.normal(size, seed=n) * 0.3 for n in range(3))
    gradients = step(q, k, v)
    assert all(bool(tf.reduce_all(tf.math.is_finite(g))) for g in gradients)
    print(peak_memory())
"""


@pytest.mark.tensorflow_only("JAX compiles the same scan; one run is enough")
@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 128])
def test_65536_tokens_fit_in_4_gib(window):
    command = textwrap.dedent(LONG).format(window=window)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    # All of the process: TensorFlow itself, inputs (0.4 GiB) and gradients.
    assert int(run.stdout.split()[-1]) < 4 * 2**30
