"""The layers against dense attention with their own weights."""

import keras
import numpy as np
import pytest

from keras_performer.layers import PerformerAttention
from tests.layers.dense_oracle import VARIANTS
from tests.layers.dense_oracle import normalise
from tests.layers.dense_oracle import project
from tests.testing import MIXED_POLICIES
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import compiled
from tests.testing import normal
from tests.testing import to_numpy

every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_the_layer_equals_the_dense_oracle_at_every_scale(name):
    layer = VARIANTS[name].attention(
        num_heads=3, key_dim=5, value_dim=7, output_shape=17
    )
    mask = np.random.default_rng(4).random((2, 29)) > 0.25
    layer.build((2, 29, 11))
    # Unit variance in, unit variance out: q and k have the scale of x.
    for dense in (layer.query, layer.key):
        dense.kernel.assign(normal(11, 3, 5, seed=2) / np.sqrt(11))
    modes = [
        compiled(lambda x, m: layer(x, mask=m), mode)
        for mode in ("eager", "xla")
    ]
    for scale in (0.5, 1.0, 2.0, 4.0, 8.0):
        x = normal(2, 29, 11, scale=scale)
        expected = VARIANTS[name].output(layer, x, key_mask=mask)
        # q and k are rounded to 6e-8 of up to 4 s before the core is called,
        # which moves an exponent by as much of up to 16 s^2.
        tolerance = 1e-5 * max(1.0, scale**2 / 4)
        for function in modes:
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
    layer = VARIANTS["favor-window"].attention(local_window=window)
    exact = VARIANTS["exact-causal"].attention()
    length = 29 if window is None else 2 * window
    x = normal(2, length, 11, scale=3.0)
    layer.build(x.shape)
    exact.build(x.shape)
    exact.set_weights([w.value for w in layer.trainable_weights])
    # 1e-5 is what is promised; both are float32 sums of `length` terms.
    assert_close(layer(x), exact(x), 1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_block_is_what_its_parts_make_of_it(name):
    block = VARIANTS[name].block(activation="relu")
    x, mask = normal(2, 7, 11), random_mask(2, 7)
    output = block(x, mask=mask)
    # 1e-5: two norms and four products of at most 26 terms each.
    assert_close(output, VARIANTS[name].block_output(block, x, mask), 1e-5)


# Equality with keras.layers.MultiHeadAttention.


def twins(causal=False, value_width=11, value_dim=7, **kwargs):
    """The stock layer and exact attention with its weights."""
    stock = keras.layers.MultiHeadAttention(
        3, 5, value_dim, bias_initializer="random_normal", **kwargs
    )
    ours = PerformerAttention(
        3, 5, value_dim, feature_map="exact", causal=causal, **kwargs
    )
    shapes = (2, 7, 11), (2, None, value_width)
    stock.build(*shapes)
    ours.build(*shapes)
    names = [w.path.split("/", 1)[1] for w in stock.weights]
    assert [w.path.split("/", 1)[1] for w in ours.weights] == names
    ours.set_weights(stock.get_weights())
    return stock, ours


def random_mask(batch, length):
    mask = np.random.default_rng(5).random((batch, length)) > 0.3
    mask[:, 0] = True
    return mask


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("output_shape", [None, 13])
@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_equals_multi_head_attention(
    causal, output_shape, use_bias
):
    stock, ours = twins(
        causal=causal,
        # The stock layer takes no other width than key_dim on JAX.
        value_dim=7 if ON_TENSORFLOW else None,
        output_shape=output_shape,
        use_bias=use_bias,
    )
    x, mask = normal(2, 7, 11, scale=2.0), random_mask(2, 7)
    # 1e-5 is what is promised: the same sums, in another order.
    expected = stock(x, x, use_causal_mask=causal)
    assert_close(ours(x), expected, 1e-5)
    expected = stock(x, x, value_mask=mask, use_causal_mask=causal)
    assert_close(ours(x, mask=mask), expected, 1e-5)
    assert_differs(ours(x), expected)


def test_exact_cross_attention_equals_multi_head_attention():
    stock, ours = twins(value_width=13)
    query, value = normal(2, 7, 11), normal(2, 5, 13, seed=1)
    mask = random_mask(2, 5)
    expected, scores = stock(
        query, value, value_mask=mask, return_attention_scores=True
    )
    actual = ours(query, value, value_mask=mask, return_attention_scores=True)
    assert_close(actual[0], expected, 1e-5)
    assert_close(actual[1], scores, 1e-5)


@pytest.mark.parametrize("name", ["favor", "relu-causal", "favor-window"])
def test_the_stock_weights_fit_every_map_one_to_one(name):
    stock, exact = twins()
    ours = VARIANTS[name].attention(3, 5, value_dim=7)
    ours.build((2, 7, 11))
    for sublayer in ("query", "key", "value", "attention_output"):
        mine, its = getattr(ours, sublayer), getattr(exact, sublayer)
        assert mine.kernel.shape == its.kernel.shape
        assert mine.bias.shape == its.bias.shape
        mine.set_weights(its.get_weights())
    x = normal(2, 7, 11)
    assert_close(ours(x), VARIANTS[name].output(ours, x), 1e-5)


# Rotary positions.


def rotated(x):
    """Each pair of coordinates turned by position times its frequency."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [
            a * np.cos(angle) - b * np.sin(angle),
            b * np.cos(angle) + a * np.sin(angle),
        ],
        axis=-1,
    )


def with_rotary(variant, layer, x):
    """The oracle's output, with queries and keys rotated by hand."""
    q, k = project(layer.query, x), project(layer.key, x)
    logits = variant.logits(layer, rotated(q), rotated(k))
    weights = normalise(logits, causal=variant.causal)
    mixed = np.einsum("bhls,bshe->blhe", weights, project(layer.value, x))
    kernel = to_numpy(layer.attention_output.kernel).astype("float64")
    output = np.einsum("blhe,heo->blo", mixed, kernel)
    return output + to_numpy(layer.attention_output.bias)


@pytest.mark.parametrize("name", VARIANTS)
def test_rotary_equals_a_rotation_by_hand(name):
    layer = VARIANTS[name].attention(2, 6, rotary=True)
    x = normal(2, 7, 11)
    output = layer(x)
    # 1e-5: float32 sums of 26 features and 7 keys, against float64.
    assert_close(output, with_rotary(VARIANTS[name], layer, x), 1e-5)
    assert_differs(output, VARIANTS[name].output(layer, x))


def test_rotary_depends_on_distances_alone():
    layer = VARIANTS["exact"].attention(2, 6, rotary=True)
    x = normal(1, 7, 11)
    alone = layer(x[:, 3:])
    shifted = layer(x, mask=np.arange(7)[None] >= 3)[:, 3:]
    # Rotations of float32 angles of at most 7: some roundings of 6e-8.
    assert_close(shifted, alone, 1e-5)
