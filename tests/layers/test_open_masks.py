"""Publicly reported faults of masks, as tests: cases O-01 to O-15.

A case that states a tolerance has it here. The other comparisons are between
two runs of float32 code, whose sums may be taken in another order: 1e-5 is
about 100 roundings.
"""

import warnings

import keras
import numpy as np
import pytest

from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from tests.layers.dense_oracle import CAUSAL
from tests.layers.dense_oracle import NOT_CAUSAL
from tests.layers.dense_oracle import SAMPLE
from tests.layers.dense_oracle import VARIANTS
from tests.testing import MIXED_POLICIES
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import compiled
from tests.testing import copy_weights
from tests.testing import input_gradient
from tests.testing import normal
from tests.testing import to_numpy
from tests.testing import weight_gradients

if ON_TENSORFLOW:
    import tensorflow as tf

every_variant = pytest.mark.parametrize("name", VARIANTS)
POLICIES = ("float32", *MIXED_POLICIES)


def prefix_mask(length, *lengths):
    """Row b is True at its first `lengths[b]` of `length` positions."""
    return np.arange(length)[None, :] < np.array(lengths)[:, None]


@every_variant
def test_o01_padded_keys_do_not_matter(name):
    layer = VARIANTS[name].attention()
    x, mask = normal(2, 7, 11), prefix_mask(7, 5, 7)
    alone = layer(x[:1, :5])
    full = layer(x[1:])
    for fill in (0.0, 5.0, 50.0):
        x[0, 5:] = fill
        padded = layer(x, mask=mask)
        assert_close(padded[:1, :5], alone, 1e-5)
        assert_close(padded[1:], full, 1e-5)


@every_variant
def test_o02_a_masked_batch_of_one_is_masked(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 7, 11)
    # Two pads are one block of the window's grid: what follows them lies on
    # the same grid as it does alone.
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], bool)
    single = layer(x[:1], mask=mask[:1])[:, 2:]
    pair = layer(x, mask=mask)[:1, 2:]
    alone = layer(x[:1, 2:])
    assert_close(single, alone, 1e-5)
    assert_close(pair, alone, 1e-5)


@every_variant
def test_o03_true_means_keep(name):
    layer = VARIANTS[name].attention()
    x, mask = normal(1, 3, 11), prefix_mask(3, 2)
    truncated = layer(x[:, :2])
    assert_close(layer(x, mask=mask)[:, :2], truncated, 1e-5)
    assert_differs(layer(x, mask=~mask)[:, :2], truncated)
    assert "*keep*" in PerformerAttention.__doc__


@every_variant
def test_o04_a_row_without_keys_gives_the_output_bias(name):
    layer = VARIANTS[name].attention()
    x, mask = normal(2, 5, 11), prefix_mask(5, 0, 5)
    output = to_numpy(layer(x, mask=mask))
    bias = to_numpy(layer.attention_output.bias)
    assert np.any(bias != 0)
    # Nothing is attended: zeros through the output kernel are exact zeros.
    np.testing.assert_array_equal(output[0], np.tile(bias, (5, 1)))
    assert_close(output[1:], layer(x[1:]), 1e-5)

    cotangent = normal(2, 5, 11, seed=1)
    gradient = input_gradient(lambda x: layer(x, mask=mask))(x, cotangent)
    gradient = to_numpy(gradient)
    np.testing.assert_array_equal(gradient[0], np.zeros((5, 11)))
    alone = input_gradient(layer)(x[1:], cotangent[1:])
    assert_close(gradient[1:], alone, 1e-5)
    for path, value in weight_gradients(
        layer, cotangent, x, mask=mask
    ).items():
        assert np.all(np.isfinite(value)), path


@pytest.mark.parametrize("name", CAUSAL)
def test_o04_left_padding_leaves_the_first_prefixes_empty(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 5, 11)
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    output = to_numpy(layer(x, mask=mask))
    bias = to_numpy(layer.attention_output.bias)
    np.testing.assert_array_equal(output[0, :2], np.tile(bias, (2, 1)))
    assert_close(output[:1, 2:], layer(x[:1, 2:]), 1e-5)
    assert_close(output[1:], layer(x[1:]), 1e-5)
    cotangent = normal(2, 5, 11, seed=1)
    gradient = input_gradient(lambda x: layer(x, mask=mask))(x, cotangent)
    assert np.all(np.isfinite(to_numpy(gradient)))
    for path, value in weight_gradients(
        layer, cotangent, x, mask=mask
    ).items():
        assert np.all(np.isfinite(value)), path


@every_variant
def test_o05_masked_values_leave_no_trace(name):
    layer = VARIANTS[name].attention()
    x, value, mask = (
        normal(2, 7, 11),
        normal(2, 7, 13, seed=1),
        np.ones((2, 7)),
    )
    mask[:, 5:] = 0
    outputs = []
    for fill in (0.0, 1e8):
        value[:, 5:] = fill
        outputs.append(to_numpy(layer(x, value, x, key_mask=mask == 1)))
    # Bit for bit: a weight of 1e-30 would show against values of 1e8.
    np.testing.assert_array_equal(*outputs)


@every_variant
def test_o06_nan_under_the_mask_does_not_spread(name):
    layer = VARIANTS[name].attention()
    x, mask = normal(1, 7, 11), prefix_mask(7, 5)
    x[:, 5:] = 0.0
    clean = layer(x, mask=mask)
    x[:, 5:] = np.nan
    assert_close(layer(x, mask=mask)[:, :5], clean[:, :5], 1e-6)


def embedded(layer, mask_zero=True):
    """A model that embeds ids and calls the layer on them."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(19, 11, mask_zero=mask_zero)(ids)
    return keras.Model(ids, layer(x))


IDS = np.array([[3, 1, 4, 15, 9, 0, 0], [2, 7, 18, 2, 8, 1, 0]], "int32")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("attention", name) for name in ("favor", *SAMPLE)),
        ("block", "favor-window"),
    ],
)
def test_o07_the_mask_of_an_embedding_is_used(kind, name):
    layer = getattr(VARIANTS[name], kind)()
    model = embedded(layer)
    x = model.layers[1](IDS)
    explicit = layer(keras.ops.copy(x), mask=IDS != 0)
    assert_close(model(IDS), explicit, 1e-6)
    unmasked = embedded(layer, mask_zero=False)
    unmasked.layers[1].set_weights(model.layers[1].get_weights())
    valid = IDS != 0
    differs = to_numpy(unmasked(IDS)), to_numpy(model(IDS))
    if VARIANTS[name].causal:
        # The pads are last: only rows of pads can see them.
        assert_close(differs[0][valid], differs[1][valid], 1e-5)
        assert_differs(differs[0][~valid], differs[1][~valid])
    else:
        assert_differs(differs[0][valid], differs[1][valid])


@pytest.mark.parametrize("kind", ["attention", "block"])
def test_o07_the_mask_reaches_a_layer_of_a_subclassed_model(kind):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(19, 11, mask_zero=True)
            self.inner = getattr(VARIANTS["favor"], kind)()

        def call(self, ids):
            return self.inner(self.embedding(ids))

    model = Model()
    output = model(IDS)
    x = keras.ops.copy(model.embedding(IDS))
    assert_close(output, model.inner(x, mask=IDS != 0), 1e-6)
    assert_differs(output, model.inner(x))


@pytest.mark.parametrize("name", SAMPLE)
def test_o08_the_mask_crosses_two_blocks_and_reaches_the_pooling(name):
    embedding = keras.layers.Embedding(19, 11, mask_zero=True)
    blocks = [VARIANTS[name].block() for _ in range(2)]
    pooling = keras.layers.GlobalAveragePooling1D()

    def pooled(length):
        ids = keras.Input((length,), dtype="int32")
        return keras.Model(ids, pooling(blocks[1](blocks[0](embedding(ids)))))

    assert_close(pooled(7)(IDS[:1]), pooled(5)(IDS[:1, :5]), 1e-5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("attention", "favor"),
        ("attention", "exact"),
        ("block", "favor-window"),
    ],
)
def test_o09_masked_input_raises_no_warning(kind, name):
    x = normal(2, 7, 11)
    x[0, 5:] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        layer = getattr(VARIANTS[name], kind)()
        layer(keras.layers.Masking()(x))
        inputs = keras.Input((7, 11))
        masked = keras.layers.Masking()(inputs)
        output = getattr(VARIANTS[name], kind)()(masked)
        keras.Model(inputs, output)(x)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o09_masked_cross_attention_raises_no_warning(name):
    x, context = normal(2, 7, 11), normal(2, 5, 13, seed=1)
    x[0, 5:], context[1, 3:] = 0.0, 0.0
    mask = keras.layers.Masking()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        layer = VARIANTS[name].attention()
        output = layer(mask(x), mask(context))
        inputs = [keras.Input((7, 11)), keras.Input((5, 13))]
        symbolic = layer(*[mask(x) for x in inputs])
        model = keras.Model(inputs, symbolic)
    # ... and the mask is used, which is what the warning was about.
    assert_close(model([x, context]), output, 1e-6)
    explicit = layer(x, context, value_mask=prefix_mask(5, 5, 3))
    assert_close(output, explicit, 1e-6)
    assert_differs(output, layer(x, context))


@every_variant
def test_o10_an_explicit_mask_crosses_a_compiled_function(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 7, 11)
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]], bool)
    eager = layer(x, mask=mask)
    traced = compiled(lambda x, m: layer(x, mask=m))(x, mask)
    # Compiled, sums run in another order: float32's rounding of a dozen terms
    # in each of three products.
    assert_close(traced, eager, 1e-5)
    assert_differs(eager, layer(x))


@pytest.mark.tensorflow_only("the report is about tf.function")
def test_o10_a_model_that_passes_the_mask_through_tf_function():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.masking = keras.layers.Masking()
            self.inner = VARIANTS["favor"].attention()
            self.traced = tf.function(lambda x, m: self.inner(x, mask=m))

        def call(self, x):
            mask = self.masking.compute_mask(x)
            return self.traced(self.masking(x), mask)

    model = Model()
    x = normal(2, 7, 11)
    x[0, 5:] = 0.0
    output = model(x)
    masked = model.inner(x, mask=prefix_mask(7, 5, 7))
    assert_close(output, masked, 1e-6)
    assert_differs(output, model.inner(x))


@pytest.mark.parametrize("name", CAUSAL)
def test_o11_padding_mask_and_causality_together(name):
    variant = VARIANTS[name]
    block = variant.block(num_heads=2, key_dim=None, activation="relu")
    x, mask = normal(3, 7, 8), prefix_mask(7, 7, 4, 1)
    # The last row is padded on the left: its first rows see no key.
    mask[2] = [0, 1, 1, 0, 1, 1, 1]
    output = block(x, mask=mask)
    # 1e-4: the case's; float32 features against float64 ones.
    assert_close(output, variant.block_output(block, x, mask), 1e-4)
    assert_differs(output, variant.block_output(block, x))


@every_variant
def test_o12_a_mask_that_does_not_factor_is_refused(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 5, 11)
    layer.build(x.shape)
    random = np.random.default_rng(0).random((2, 5, 5)) > 0.3
    for mask in (random, np.tri(5, dtype=bool), random[:, None]):
        with pytest.raises(ValueError, match=r"(?s)key_mask.*causal"):
            layer(x, attention_mask=mask)
        with pytest.raises(ValueError):
            layer(x, mask=mask)


@every_variant
def test_o12_a_mask_that_factors_is_the_key_mask(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 5, 11)
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], bool)
    expected = layer(x, mask=mask)
    assert_differs(expected, layer(x))
    for shape in ((2, 5), (2, 1, 5), (2, 1, 1, 5)):
        actual = layer(x, attention_mask=mask.reshape(shape))
        np.testing.assert_array_equal(to_numpy(actual), to_numpy(expected))


@pytest.mark.parametrize("name", ["favor-window", "relu"])
@pytest.mark.parametrize("policy", POLICIES)
def test_o13_every_form_of_a_mask_gives_the_same_bits(name, policy):
    layer = VARIANTS[name].attention(dtype=policy)
    x = normal(2, 7, 11)
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]], bool)
    forms = [
        keras.ops.convert_to_tensor(mask, dtype=dtype)
        for dtype in ("bool", "int32", "float32", "float16")
    ]
    forms += [mask, mask.tolist(), mask.astype("int32").tolist()]
    outputs = [layer(x, mask=form) for form in forms]
    for output in outputs:
        dtype = keras.backend.standardize_dtype(output.dtype)
        assert dtype == layer.compute_dtype
        np.testing.assert_array_equal(to_numpy(output), to_numpy(outputs[0]))
    assert_differs(outputs[0], layer(x))


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o14_the_mask_of_the_context_has_its_length(name):
    variant = VARIANTS[name]
    layer = variant.attention(num_heads=2, key_dim=11)
    query, context = normal(2, 3, 13), normal(2, 5, 7, seed=1)
    mask = prefix_mask(5, 5, 2)
    layer.build(query.shape, context.shape)
    expected = variant.output(layer, query, context)
    masked = variant.output(layer, query, context, key_mask=mask)
    # 1e-4: the case's; float32 features against float64 ones.
    for argument in ("value_mask", "key_mask"):
        actual = layer(query, context, **{argument: mask})
        assert_close(actual, masked, 1e-4)
    assert_close(layer(query, context), expected, 1e-4)
    assert_differs(masked, expected)
    for argument in ("value_mask", "key_mask"):
        with pytest.raises(ValueError, match=r"(?s)(3.*5|5.*3)"):
            layer(query, context, **{argument: prefix_mask(3, 3, 2)})


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o14_masks_of_key_and_value_are_both_kept(name):
    layer = VARIANTS[name].attention()
    query, value = normal(2, 3, 13), normal(2, 5, 7, seed=1)
    key = normal(2, 5, 17, seed=2)
    one = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0]], bool)
    two = np.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 1]], bool)
    both = layer(query, value, key, value_mask=one, key_mask=two)
    assert_close(both, layer(query, value, key, key_mask=one & two), 1e-6)
    # The query's mask says which outputs count, and hides no key.
    queries = prefix_mask(3, 2, 3)
    unmasked = layer(query, value, key)
    seen = to_numpy(layer(query, value, key, query_mask=queries))
    assert_close(seen[queries], to_numpy(unmasked)[queries], 1e-6)


@pytest.mark.parametrize("layer_class", [PerformerAttention, PerformerBlock])
def test_o15_inputs_of_rank_four_are_refused(layer_class):
    x = normal(2, 3, 5, 8)
    with pytest.raises(ValueError, match=r"(?s)(rank|ndim|shape|dimension)"):
        layer_class(2, 7)(x, mask=np.ones((2, 3, 5), bool))
    with pytest.raises(ValueError, match=r"(?s)(rank|ndim|shape|dimension)"):
        layer_class(2, 7).build((2, 3, 5, 8))


def test_o07_twins_with_equal_weights_agree():
    # The comparisons above rest on this: weights decide everything.
    layers = [VARIANTS["favor"].attention() for _ in range(2)]
    x = normal(2, 7, 11)
    first = layers[0](x)
    assert_differs(layers[1](x), first)
    copy_weights(*layers)
    np.testing.assert_array_equal(to_numpy(layers[1](x)), to_numpy(first))
