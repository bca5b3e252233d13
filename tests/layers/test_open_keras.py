"""Publicly reported faults of what Keras asks of a layer, as tests.

Cases O-38 to O-48 and O-57 to O-60.
"""

import copy
import inspect
import json
import pickle
import warnings

import keras
import numpy as np
import pytest

from keras_performer.feature_maps import FavorPlus
from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from tests.layers.dense_oracle import NOT_CAUSAL
from tests.layers.dense_oracle import SAMPLE
from tests.layers.dense_oracle import VARIANTS
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy

every_variant = pytest.mark.parametrize("name", VARIANTS)
samples = pytest.mark.parametrize("name", SAMPLE)
linear_samples = pytest.mark.parametrize("name", ["favor-window", "relu"])
LAYERS = pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("attention", "favor"),
        ("attention", "relu-causal"),
        ("block", "favor-window"),
    ],
)
KINDS = pytest.mark.parametrize("kind", ["attention", "block"])


def make(kind, name="favor-window", **kwargs):
    return getattr(VARIANTS[name], kind)(**kwargs)


def model_of(*layers, shape=(None, 11)):
    inputs = outputs = keras.Input(shape)
    for layer in layers:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


@pytest.mark.one_in(2)
@pytest.mark.tensorflow_only("MirroredStrategy is TensorFlow's")
@linear_samples
def test_o38_a_block_with_dropout_under_mirrored_strategy(
    name, two_replicas, tmp_path
):
    with two_replicas.scope():
        model = model_of(make("block", name, dropout=0.1))
        model.compile("sgd", "mse")
    x = normal(8, 7, 11)
    history = model.fit(x, x, batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    predicted = model.predict(x, batch_size=4, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    revived = keras.models.load_model(path)
    assert_close(revived.predict(x, verbose=0), predicted, 1e-5)


ATTENTION_ARGUMENTS = {
    "num_heads": 3,
    "key_dim": 10,
    "value_dim": 7,
    "feature_map": FavorPlus(antithetic=False),
    "num_features": 38,
    "causal": True,
    "redraw_interval": 50,
    "local_window": 4,
    "chunk_size": 8,
    "rotary": True,
    "dropout": 0.2,
    "use_bias": False,
    "output_shape": 13,
    "seed": 5,
    "kernel_initializer": "he_normal",
    "bias_initializer": "ones",
    "kernel_regularizer": "l2",
    "bias_regularizer": "l1",
    "activity_regularizer": "l2",
    "kernel_constraint": "max_norm",
    "bias_constraint": "non_neg",
    "name": "special",
    "dtype": "mixed_bfloat16",
    "trainable": False,
}
BLOCK_ARGUMENTS = {
    "num_heads": 3,
    "intermediate_dim": 17,
    "key_dim": 10,
    "feature_map": FavorPlus(antithetic=False),
    "num_features": 38,
    "causal": True,
    "redraw_interval": 50,
    "local_window": 4,
    "chunk_size": 8,
    "rotary": True,
    "dropout": 0.2,
    "activation": "relu",
    "normalize_first": False,
    "layer_norm_epsilon": 1e-3,
    "use_bias": False,
    "seed": 5,
    "kernel_initializer": "he_normal",
    "bias_initializer": "ones",
    "kernel_regularizer": "l2",
    "bias_regularizer": "l1",
    "activity_regularizer": "l2",
    "kernel_constraint": "max_norm",
    "bias_constraint": "non_neg",
    "name": "special",
    "dtype": "mixed_bfloat16",
    "trainable": False,
}


@pytest.mark.parametrize(
    ("layer_class", "arguments"),
    [
        (PerformerAttention, ATTENTION_ARGUMENTS),
        (PerformerBlock, BLOCK_ARGUMENTS),
    ],
)
def test_o39_every_argument_survives_json(layer_class, arguments):
    signature = inspect.signature(layer_class.__init__).parameters
    base = {"name", "dtype", "trainable"}
    assert set(signature) - {"self", "kwargs"} == set(arguments) - base
    layer = layer_class(**arguments)
    config = layer.get_config()
    plain = layer_class(2, 3).get_config()
    for argument, value in arguments.items():
        assert argument in config
        assert config[argument] != plain[argument], argument
    text = json.dumps(config)
    revived = layer_class.from_config(json.loads(text))
    assert json.dumps(revived.get_config()) == text
    assert revived.get_config() == json.loads(text)


@LAYERS
def test_o39_a_saved_model_needs_no_custom_objects(kind, name, tmp_path):
    model = model_of(make(kind, name))
    path = tmp_path / "model.keras"
    model.save(path)
    revived = keras.models.load_model(path)
    x = normal(2, 7, 11)
    assert type(revived.layers[1]) is type(model.layers[1])
    np.testing.assert_array_equal(to_numpy(revived(x)), to_numpy(model(x)))


def policies_of(layer):
    """Policies of a layer and of everything inside it, by path."""
    layers = [layer, *layer._flatten_layers(include_self=False)]
    return {inner.path: inner.dtype_policy.name for inner in layers}


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("attention", "float32"),
        ("attention", "mixed_float16"),
        ("attention", "mixed_bfloat16"),
        ("block", "mixed_float16"),
    ],
)
def test_o40_a_layer_keeps_the_policy_it_was_saved_with(saved, kind, tmp_path):
    loaded = "float32" if saved != "float32" else "mixed_float16"
    keras.config.set_dtype_policy(saved)
    model = model_of(make(kind, dropout=0.1))
    x = normal(2, 7, 11)
    expected = model.predict(x, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    keras.config.set_dtype_policy(loaded)
    revived = keras.models.load_model(path)
    actual = revived.predict(x, verbose=0)
    np.testing.assert_array_equal(to_numpy(actual), to_numpy(expected))
    assert actual.dtype == expected.dtype
    policies = policies_of(revived.layers[1])
    assert len(policies) > 4
    assert set(policies.values()) == {saved}


@keras.saving.register_keras_serializable("keras_performer_tests")
class TwoBlocks(keras.layers.Layer):
    """A custom layer that holds two blocks."""

    def __init__(self, name_of_variant, **kwargs):
        super().__init__(**kwargs)
        self.name_of_variant = name_of_variant
        self.first = make("block", name_of_variant)
        self.second = make("block", name_of_variant)

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build(input_shape)

    def call(self, inputs):
        return self.second(self.first(inputs))

    def compute_output_shape(self, input_shape):
        # Keras needs it on JAX, where it cannot trace an unknown length.
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "name_of_variant": self.name_of_variant,
        }


@pytest.mark.one_in(3)
@samples
def test_o41_nested_blocks_are_saved_with_all_their_weights(name, tmp_path):
    model = model_of(TwoBlocks(name))
    x = normal(2, 7, 11)
    model.compile("sgd", "mse")
    model.fit(x, normal(2, 7, 11, seed=1), verbose=0)
    expected = to_numpy(model(x))
    whole, weights = tmp_path / "m.keras", tmp_path / "m.weights.h5"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save(whole)
        model.save_weights(weights)
        revived = keras.models.load_model(whole)
        fresh = model_of(TwoBlocks(name))
        assert_differs(to_numpy(fresh(x)), expected)
        fresh.load_weights(weights)
    for other in (revived, fresh):
        for mine, its in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(
                to_numpy(mine.value), to_numpy(its.value), mine.path
            )
        assert_close(to_numpy(other(x)), expected, 1e-6)


def attention_parameters(width, heads, key_dim):
    projections = 3 * (width * heads * key_dim + heads * key_dim)
    return projections + heads * key_dim * width + width


@pytest.mark.parametrize("how", ["build", "symbolic"])
@pytest.mark.parametrize(
    ("name", "features"), [("favor-window", 26), ("exact", 0)]
)
@KINDS
def test_o42_weights_exist_before_any_data(kind, how, name, features):
    layer = make(kind, name)
    if how == "build":
        layer.build((None, None, 11))
    else:
        model_of(layer)
    # q, k, v and output: 2 weights each.
    count, parameters = 8, attention_parameters(11, 2, 5)
    if kind == "block":
        count += 2 + 2 + 2 + 2
        parameters += 2 * 2 * 11 + (11 * 13 + 13) + (13 * 11 + 11)
    if features:
        count += 1
        parameters += features * 5
    assert len(layer.weights) == count
    assert layer.count_params() == parameters
    model_of(layer).predict(normal(2, 7, 11), verbose=0)
    assert len(layer.weights) == count
    assert layer.count_params() == parameters


def summary_of(model):
    lines = []
    model.summary(print_fn=lines.append, line_length=120)
    return "\n".join(lines)


def test_o43_no_question_mark_in_a_summary():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = make("attention")
            self.block = make("block")

        def build(self, input_shape):
            self.attention.build(input_shape)
            self.block.build(input_shape)

        def call(self, inputs):
            return self.block(self.attention(inputs))

    subclassed = Model()
    subclassed.build((None, 7, 11))
    sequential = keras.Sequential(
        [keras.Input((7, 11)), make("attention"), make("block")]
    )
    functional = model_of(make("attention"), make("block"))
    parameters = subclassed.count_params()
    assert parameters > 0
    for model in (functional, sequential, subclassed):
        text = summary_of(model)
        rows = [line for line in text.splitlines() if "erformer" in line]
        assert len(rows) >= 2, text
        assert not any("?" in row or "unbuilt" in row for row in rows), text
        assert f"{parameters:,}" in text


def test_o43_a_called_subclassed_model_has_no_question_mark():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = make("attention")
            self.block = make("block")

        def call(self, inputs):
            return self.block(self.attention(inputs))

    model = Model()
    model(normal(2, 7, 11))
    rows = [r for r in summary_of(model).splitlines() if "erformer" in r]
    assert len(rows) >= 2
    assert not any("?" in row for row in rows), rows


@pytest.mark.parametrize("name", ["favor", "exact"])
@pytest.mark.parametrize(
    ("output_shape", "tail"),
    [(None, (5,)), (3, (3,)), ((3,), (3,)), ((2, 3), (2, 3))],
)
def test_o44_all_shapes_agree(name, output_shape, tail):
    layer = VARIANTS[name].attention(value_dim=2, output_shape=output_shape)
    query, value = (None, 8, 5), (None, 11, 7)
    assert layer.compute_output_shape(query, value) == (None, 8, *tail)
    symbolic = layer(keras.Input(query[1:]), keras.Input(value[1:]))
    assert tuple(symbolic.shape) == (None, 8, *tail)
    eager = layer(normal(2, 8, 5), normal(2, 11, 7))
    assert tuple(eager.shape) == (2, 8, *tail)


@samples
def test_o44_a_width_that_the_heads_do_not_divide(name):
    layer = VARIANTS[name].attention(num_heads=8, key_dim=3)
    x = normal(2, 24, 21)
    assert layer.compute_output_shape((2, 24, 21)) == (2, 24, 21)
    output = layer(x)
    assert tuple(output.shape) == (2, 24, 21)
    assert_close(output, VARIANTS[name].output(layer, x), 1e-5)


@every_variant
def test_o45_scores_are_the_weights_of_the_dense_oracle(name):
    variant = VARIANTS[name]
    layer = variant.attention()
    x, mask = normal(3, 7, 11), np.ones((3, 7), bool)
    mask[0, 5:], mask[1, :2] = False, False
    output, scores = layer(x, mask=mask, return_attention_scores=True)
    assert tuple(scores.shape) == (3, 2, 7, 7)
    assert_close(output, layer(x, mask=mask), 1e-5)
    assert_close(scores, variant.weights(layer, x, x, mask), 1e-5)
    sums = to_numpy(scores).sum(-1)
    if variant.causal:
        # The two padded positions at the start of this row see no key.
        assert np.all(sums[1, :, :2] == 0.0)
        sums[1, :, :2] = 1.0
    # 7 float32 terms: a few roundings of 6e-8.
    np.testing.assert_allclose(sums, 1.0, atol=1e-6)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_o45_scores_of_symbolic_cross_attention(name):
    layer = VARIANTS[name].attention()
    inputs = [keras.Input((7, 11)), keras.Input((5, 13))]
    output, scores = layer(*inputs, return_attention_scores=True)
    assert tuple(output.shape) == (None, 7, 11)
    assert tuple(scores.shape) == (None, 2, 7, 5)
    model = keras.Model(inputs, [output, scores])
    query, value = normal(2, 7, 11), normal(2, 5, 13, seed=1)
    expected = VARIANTS[name].weights(layer, query, value)
    assert_close(model([query, value])[1], expected, 1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "with_input"),
    [*((name, True) for name in SAMPLE), ("relu", False)],
)
def test_o47_attention_and_block_in_a_sequential(name, with_input):
    layers = [
        VARIANTS[name].attention(2, 4),
        VARIANTS[name].block(2, 4),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
    if with_input:
        layers.insert(0, keras.Input((7, 11)))
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    x = normal(4, 7, 11)
    history = model.fit(x, normal(4, 1), batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert model.predict(x, verbose=0).shape == (4, 1)


@every_variant
def test_o47_one_tensor_is_self_attention(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 7, 11)
    alone = layer(x)
    assert_close(layer(x, x), alone, 1e-6)
    assert_close(layer(x, x, x), alone, 1e-6)


def test_o47_a_list_of_tensors_is_refused_with_help():
    x = normal(2, 7, 11)
    with pytest.raises((TypeError, ValueError), match="query"):
        VARIANTS["favor"].attention()([x, x])


@linear_samples
def test_o48_a_clone_has_the_weights_that_it_is_given(name):
    inputs, mask = keras.Input((7, 11)), keras.Input((7,), dtype="bool")
    x = make("block", name)(inputs, mask=mask)
    model = keras.Model([inputs, mask], make("block", name)(x, mask=mask))
    clone = keras.models.clone_model(model)
    mine = {id(variable) for variable in model.variables}
    assert not mine & {id(variable) for variable in clone.variables}
    keep = np.ones((2, 7), bool)
    keep[:, 4:] = False
    keep[1, 0] = False
    data = [normal(2, 7, 11), keep]
    expected = model.predict(data, verbose=0)
    assert_differs(clone.predict(data, verbose=0), expected)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(data, verbose=0), expected)
    unmasked = clone.predict([data[0], np.ones((2, 7), bool)], verbose=0)
    assert_differs(unmasked, expected)


@linear_samples
def test_o57_a_frozen_block_does_not_train(name):
    block = make("block", name)
    model = model_of(block, keras.layers.Dense(3))
    block.trainable = False
    model.compile("sgd", "mse")
    before = block.get_weights()
    x, y = normal(4, 7, 11), normal(4, 7, 3)
    model.fit(x, y, batch_size=2, verbose=0)
    assert block.trainable_weights == []
    for old, new in zip(before, block.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    block.trainable = True
    assert len(block.trainable_weights) == 16
    paths = [weight.path for weight in block.non_trainable_weights]
    assert paths == [block.attention.projection.path]
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=2, verbose=0)
    for weight in block.trainable_weights:
        assert not weight.path.endswith("projection")
    projection = [w.path for w in block.weights].index(paths[0])
    after = block.get_weights()
    np.testing.assert_array_equal(before[projection], after[projection])
    pairs = zip(before, after, strict=True)
    changed = [np.any(old != new) for old, new in pairs]
    assert sum(changed) >= 15


@samples
def test_o58_lora_trains_the_inner_projections_only(name):
    layer = VARIANTS[name].attention()
    model = model_of(layer)
    x = normal(2, 7, 11)
    before = to_numpy(layer(x))
    layer.key.trainable = layer.attention_output.trainable = False
    for dense in (layer.query, layer.value):
        dense.enable_lora(4)
    np.testing.assert_array_equal(to_numpy(layer(x)), before)
    paths = {w.path.split("/")[-2] for w in layer.trainable_weights}
    assert paths == {"query", "value"}
    model.compile("sgd", "mse")
    model.fit(x, x, epochs=2, verbose=0)
    assert_differs(layer(x), before, least=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "favor",
        pytest.param("relu-causal", marks=pytest.mark.slow),
        pytest.param("exact", marks=pytest.mark.slow),
    ],
)
def test_o58_quantized_outputs_are_near(name):
    layer = VARIANTS[name].attention(num_heads=2, key_dim=16)
    model = model_of(layer, shape=(None, 32))
    x = normal(2, 7, 32)
    before = model.predict(x, verbose=0)
    with warnings.catch_warnings():
        # Keras warns about each layer that it leaves as it is.
        warnings.simplefilter("ignore")
        model.quantize("int8")
    assert layer.query.dtype_policy.name.startswith("int8")
    # 5 % is the case's.
    assert_close(model.predict(x, verbose=0), before, 0.05)


def test_o59_weight_paths_are_unique_and_scoped(tmp_path):
    pytest.importorskip("tensorflow", reason="TensorBoard writes through it")
    blocks = [make("block", dropout=0.1) for _ in range(2)]
    model = model_of(*blocks)
    paths = [weight.path for weight in model.weights]
    assert len(set(paths)) == len(paths) == 34
    for block in blocks:
        assert all(w.path.startswith(f"{block.name}/") for w in block.weights)
    model.compile("sgd", "mse")
    x = normal(4, 7, 11)
    board = keras.callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_graph=True
    )
    model.fit(x, x, validation_data=(x, x), callbacks=[board], verbose=0)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@samples
def test_o60_pickle_and_deepcopy_keep_the_predictions(name):
    model = model_of(make("attention", name), make("block", name, dropout=0.1))
    x = normal(2, 7, 11)
    expected = to_numpy(model(x))
    twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for twin in twins:
        np.testing.assert_array_equal(to_numpy(twin(x)), expected)
    for layer in model.layers[1:]:
        config = layer.get_config()
        assert copy.deepcopy(config) == config
        assert pickle.loads(pickle.dumps(config)) == config
