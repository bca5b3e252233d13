"""PerformerAttention against dense attention with its own weights."""

import numpy as np
import pytest

from tests.layers.dense_oracle import VARIANTS
from tests.testing import MIXED_POLICIES
from tests.testing import assert_close
from tests.testing import compiled
from tests.testing import normal

every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_the_layer_equals_the_dense_oracle_at_every_scale(name, scale):
    layer = VARIANTS[name].attention(
        num_heads=3, key_dim=5, value_dim=7, output_shape=17
    )
    x = normal(2, 29, 11, scale=scale)
    mask = np.random.default_rng(4).random((2, 29)) > 0.25
    layer.build(x.shape)
    # Unit variance in, unit variance out: q and k have the scale of x.
    for dense in (layer.query, layer.key):
        dense.kernel.assign(normal(11, 3, 5, seed=2) / np.sqrt(11))
    expected = VARIANTS[name].output(layer, x, key_mask=mask)
    # q and k themselves are rounded here, to 6e-8 of up to 5 s: at s = 8 an
    # exponent of up to 400 is off by 2e-5 before the core is even called.
    tolerance = 1e-5 * max(1.0, scale**2 / 4)
    for mode in ("eager", "xla"):
        function = compiled(lambda x, m: layer(x, mask=m), mode)
        assert_close(function(x, mask), expected, tolerance)


@pytest.mark.tensorflow_only("JAX keeps float64 off by default")
@every_variant
def test_float64_is_float64_throughout(name):
    layer = VARIANTS[name].attention(dtype="float64")
    x = normal(2, 13, 11).astype("float64")
    mask = np.random.default_rng(4).random((2, 13)) > 0.25
    output = layer(x, mask=mask)
    expected = VARIANTS[name].output(layer, x, key_mask=mask)
    # One float32 step anywhere would leave 1e-8 or more.
    assert_close(output, expected, 1e-12)


@every_variant
@pytest.mark.parametrize("policy", MIXED_POLICIES)
def test_low_precision_stays_near_float32(name, policy):
    half = VARIANTS[name].attention(dtype=policy)
    full = VARIANTS[name].attention()
    x = normal(2, 29, 11)
    half.build(x.shape)
    full.build(x.shape)
    half.set_weights(full.get_weights())
    # The projections round to 11 and to 8 bits, and then the exponent does:
    # a few of 5e-4 and of 4e-3.
    tolerance = {"mixed_float16": 5e-3, "mixed_bfloat16": 4e-2}[policy]
    assert_close(half(x), full(x), tolerance)


@pytest.mark.parametrize("window", [4, 5, None])
def test_two_windows_of_tokens_are_attended_exactly(window):
    layer = VARIANTS["favor-default"].attention(local_window=window)
    exact = VARIANTS["exact-causal"].attention()
    length = 29 if window is None else 2 * window
    x = normal(2, length, 11, scale=3.0)
    layer.build(x.shape)
    exact.build(x.shape)
    exact.set_weights([w.value for w in layer.trainable_weights])
    # 1e-5 is what is promised; both are float32 sums of `length` terms.
    assert_close(layer(x), exact(x), 1e-5)
