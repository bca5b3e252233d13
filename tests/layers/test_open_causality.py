"""Publicly reported faults of causality and decoding, as tests.

Cases O-16 to O-18, O-28.
"""

import keras
import numpy as np
import pytest

from tests.layers.dense_oracle import CAUSAL
from tests.layers.dense_oracle import NOT_CAUSAL
from tests.layers.dense_oracle import VARIANTS
from tests.testing import assert_close
from tests.testing import compiled
from tests.testing import input_gradient
from tests.testing import normal
from tests.testing import to_numpy

causal_variants = pytest.mark.parametrize("name", CAUSAL)
layers = pytest.mark.parametrize(
    ("kind", "name"),
    [*(("attention", name) for name in CAUSAL), ("block", "favor-window")],
)
LENGTH = 7


def gradients_of_prefixes(function, x):
    """Gradient of `out[:, :t]` with respect to x, for t = 1 .. L - 1."""
    gradient = compiled(input_gradient(function))
    for t in range(1, x.shape[1]):
        # Random weights on the outputs: no two entries cancel.
        cotangent = normal(*x.shape, seed=1)
        cotangent[:, t:] = 0.0
        yield t, to_numpy(gradient(x, cotangent))


@layers
def test_o16_no_gradient_from_the_past_to_the_future(kind, name):
    layer = getattr(VARIANTS[name], kind)()
    x = normal(1, LENGTH, 11)
    for t, gradient in gradients_of_prefixes(layer, x):
        assert np.all(gradient[:, t:] == 0.0)
        assert np.all(np.any(gradient[:, :t] != 0.0, axis=-1))


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("attention", name) for name in NOT_CAUSAL), ("block", "favor")],
)
def test_o16_without_the_flag_the_future_is_seen(kind, name):
    layer = getattr(VARIANTS[name], kind)()
    x = normal(1, LENGTH, 11)
    for t, gradient in gradients_of_prefixes(layer, x):
        assert np.all(np.any(gradient[:, t:] != 0.0, axis=-1))


@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o16_the_flag_at_the_call_equals_that_of_the_constructor(name, window):
    layer = VARIANTS[name].attention(local_window=window)
    x = normal(2, LENGTH, 11)
    at_call = layer(x, use_causal_mask=True)
    causal = VARIANTS[name].attention(causal=True, local_window=window)
    causal.build(x.shape)
    causal.set_weights(layer.get_weights())
    assert_close(at_call, causal(x), 1e-5)
    gradients = gradients_of_prefixes(
        lambda x: layer(x, use_causal_mask=True), x
    )
    for t, gradient in gradients:
        assert np.all(gradient[:, t:] == 0.0)


@layers
def test_o17_a_large_last_input_does_not_change_the_past(kind, name):
    layer = getattr(VARIANTS[name], kind)()
    x = normal(1, LENGTH, 11)
    before = to_numpy(layer(x))
    for factor in (5.0, 20.0, 50.0):
        large = x.copy()
        large[0, -1] *= factor
        after = to_numpy(layer(large))
        assert np.all(np.isfinite(after))
        # 1e-5 is the case's. Only the order of sums could change at all.
        assert np.max(np.abs(after[:, :-1] - before[:, :-1])) <= 1e-5
        assert np.max(np.abs(after[:, -1] - before[:, -1])) > 1e-2


@causal_variants
def test_o18_causal_attention_needs_equal_lengths(name):
    layer = VARIANTS[name].attention()
    query, context = normal(1, 5, 11), normal(1, 7, 11, seed=1)
    with pytest.raises(ValueError, match=r"(?s)(5.*7|7.*5)"):
        layer(query, context)
    layer = VARIANTS[name].attention()
    with pytest.raises(ValueError, match=r"(?s)(5.*7|7.*5)"):
        layer(keras.Input((5, 11)), keras.Input((7, 11)))


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o18_bidirectional_attention_takes_any_two_lengths(name):
    variant = VARIANTS[name]
    layer = variant.attention()
    query, context = normal(1, 5, 11), normal(1, 7, 13, seed=1)
    output = layer(query, context)
    assert tuple(output.shape) == (1, 5, 11)
    # 1e-5: float32 sums of 26 features and 7 keys, against float64.
    assert_close(output, variant.output(layer, query, context), 1e-5)


@layers
def test_o28_growing_prefixes_give_the_full_pass(kind, name):
    layer = getattr(VARIANTS[name], kind)()
    x = normal(2, 9, 13)
    full = to_numpy(layer(x, training=False))
    for t in range(9):
        prefix = to_numpy(layer(x[:, : t + 1], training=False))
        # 1e-4 is the case's, of what a reader of logits would notice.
        assert_close(prefix[:, t], full[:, t], 1e-4)
