"""What every layer owes: the ladder of checks, and the public contract."""

import inspect
import json
import pickle

import keras
import numpy as np
import pytest

from keras_performer.feature_maps import FavorPlus
from keras_performer.feature_maps import FeatureMap
from keras_performer.feature_maps import GeneralizedKernel
from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from keras_performer.layers import TokenAndPositionEmbedding
from tests.layers.dense_oracle import VARIANTS
from tests.testing import Ladder
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy

SELF = {"query": normal(2, 7, 11)}
CROSS = {"query": normal(2, 7, 11), "value": normal(2, 5, 13, seed=1)}
THREE = {**CROSS, "key": normal(2, 5, 17, seed=2)}
IDS = np.random.default_rng(0).integers(1, 19, (2, 7)).astype("int32")
BASE = {"num_heads": 2, "key_dim": 3, "num_features": 26}


@keras.saving.register_keras_serializable("keras_performer_tests")
class Squares(FeatureMap):
    """A user's own map: the squares of the input, and nothing drawn."""

    def __call__(self, x, projection=None, is_query=True):
        return keras.ops.square(x)


ATTENTION = {
    "defaults": {},
    "causal": {"causal": True},
    "pure-causal": {"causal": True, "local_window": 0},
    "small-window": {"causal": True, "local_window": 2},
    "short-chunk": {"causal": True, "local_window": 0, "chunk_size": 3},
    "relu": {"feature_map": "relu"},
    "relu-causal": {"feature_map": "relu", "causal": True},
    "exact": {"feature_map": "exact"},
    "exact-causal": {"feature_map": "exact", "causal": True},
    "elu": {"feature_map": GeneralizedKernel("elu", epsilon=0.01)},
    "no-pairs": {"feature_map": FavorPlus(antithetic=False)},
    "rotary": {"rotary": True, "key_dim": 4, "causal": True},
    "own-map": {"feature_map": Squares()},
    "no-bias": {"use_bias": False, "output_shape": 19, "value_dim": 5},
    "dropout": {"dropout": 0.3, "seed": 5},
    "penalties": {
        "kernel_regularizer": "l2",
        "bias_regularizer": "l2",
        "activity_regularizer": "l2",
        "kernel_constraint": keras.constraints.MaxNorm(2.0),
        "bias_constraint": keras.constraints.MaxNorm(2.0),
        "kernel_initializer": keras.initializers.HeNormal(seed=3),
        "bias_initializer": keras.initializers.RandomNormal(seed=4),
    },
}


def slow_unless(fast, names):
    """Parameters of which only some run by default: compiling takes long."""
    return [
        name if name in fast else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


def attention_ladder(name):
    kwargs = {**BASE, **ATTENTION[name]}
    feature_map = kwargs.get("feature_map", "favor+")
    projected = feature_map != "exact" and name != "own-map"
    return Ladder(
        PerformerAttention,
        kwargs,
        SELF,
        output_shape=(2, 7, kwargs.get("output_shape", 11)),
        trainable=8 if kwargs.get("use_bias", True) else 4,
        non_trainable=int(projected),
        seeds=int("dropout" in kwargs),
        # One for each kernel and each bias, and one for the output.
        losses=9 if name == "penalties" else 0,
    )


@pytest.mark.parametrize(
    "name",
    slow_unless(
        (
            "defaults",
            "small-window",
            "relu-causal",
            "exact",
            "rotary",
            "own-map",
            "no-bias",
            "dropout",
            "penalties",
        ),
        ATTENTION,
    ),
)
def test_attention_climbs_the_ladder(name):
    attention_ladder(name).climb()


@pytest.mark.parametrize(
    "name",
    slow_unless(
        ("defaults", "small-window", "relu-causal", "exact"), ATTENTION
    ),
)
def test_attention_trains_when_compiled_by_xla(name):
    attention_ladder(name).check_fit_step(jit_compile=True)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("defaults", THREE),
        ("exact", CROSS),
        pytest.param("defaults", CROSS, marks=pytest.mark.slow),
        pytest.param("relu", THREE, marks=pytest.mark.slow),
        pytest.param("exact", THREE, marks=pytest.mark.slow),
        pytest.param("own-map", CROSS, marks=pytest.mark.slow),
    ],
)
def test_cross_attention_climbs_the_ladder(name, inputs):
    ladder = Ladder(
        PerformerAttention,
        {**BASE, **ATTENTION[name]},
        inputs,
        output_shape=(2, 7, 11),
        trainable=8,
        non_trainable=int(name in ("defaults", "relu")),
    )
    ladder.climb()
    if name == "defaults":
        ladder.check_fit_step(jit_compile=True)


BLOCK = {
    "defaults": {},
    "causal": {"causal": True},
    "small-window": {"causal": True, "local_window": 2},
    "relu-causal": {"feature_map": "relu", "causal": True},
    "exact": {"feature_map": "exact"},
    "post-norm": {"normalize_first": False, "activation": "relu"},
    "no-bias": {"use_bias": False, "layer_norm_epsilon": 1e-3},
    "dropout": {"dropout": 0.3, "seed": 5, "causal": True},
    "rotary": {"rotary": True, "key_dim": 4},
}


def block_ladder(name):
    kwargs = {"num_heads": 2, "intermediate_dim": 13, "key_dim": 3}
    kwargs = {**kwargs, "num_features": 26, **BLOCK[name]}
    block = PerformerBlock(**kwargs)
    block.build(SELF["query"].shape)
    # A norm may keep its offset where no other bias is wanted.
    trainable = len(block.trainable_weights)
    assert trainable in ((16,) if kwargs.get("use_bias", True) else (8, 10))
    return Ladder(
        PerformerBlock,
        kwargs,
        SELF,
        output_shape=(2, 7, 11),
        trainable=trainable,
        non_trainable=int(name != "exact"),
        seeds=2 if "dropout" in kwargs else 0,
    )


@pytest.mark.parametrize(
    "name",
    slow_unless(
        ("defaults", "small-window", "post-norm", "dropout", "no-bias"), BLOCK
    ),
)
def test_block_climbs_the_ladder(name):
    block_ladder(name).climb()


@pytest.mark.parametrize("name", slow_unless(("defaults", "dropout"), BLOCK))
def test_block_trains_when_compiled_by_xla(name):
    block_ladder(name).check_fit_step(jit_compile=True)


@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.parametrize("position", ["learned", "grid", "sine", None])
def test_embedding_climbs_the_ladder(position, mask_zero):
    grid = None
    if position == "grid":
        position, grid = "learned", (7, 1)
    # Sines and cosines come in pairs.
    width = 10 if position == "sine" else 11
    ladder = Ladder(
        TokenAndPositionEmbedding,
        {
            "vocabulary_size": 19,
            "sequence_length": 7,
            "embedding_dim": width,
            "position": position,
            "mask_zero": mask_zero,
            "reverse_dtype": "float32",
            "grid": grid,
        },
        {"inputs": IDS},
        output_shape=(2, 7, width),
        trainable=1 + len(grid or (position == "learned") * [7]),
        moving=("embeddings", "position_embedding"),
    )
    ladder.climb()
    ladder.check_fit_step(jit_compile=True)


# Arguments.

POSITIVE = "expected a positive integer"
INVALID_ATTENTION = [
    ("num_heads", 0, POSITIVE),
    ("num_heads", -1, POSITIVE),
    ("num_heads", 1.5, POSITIVE),
    ("num_heads", "2", POSITIVE),
    ("num_heads", None, POSITIVE),
    ("key_dim", 0, POSITIVE),
    ("key_dim", 2.5, POSITIVE),
    ("value_dim", 0, "expected"),
    ("value_dim", "3", "expected"),
    ("feature_map", "no_such_map", "expected"),
    ("feature_map", 3, ""),
    ("num_features", 0, POSITIVE),
    ("num_features", 2.5, POSITIVE),
    ("redraw_interval", 0, "expected"),
    ("redraw_interval", 2.5, "expected"),
    ("local_window", -1, "expected"),
    ("local_window", 1.5, "expected"),
    ("chunk_size", 0, "expected"),
    ("chunk_size", 2.5, "expected"),
    ("dropout", -0.1, "expected"),
    ("dropout", 1.5, "expected"),
    ("dropout", "high", "expected"),
    ("output_shape", 0, "expected"),
    ("output_shape", (3, -1), "expected"),
    ("seed", "seven", ""),
    ("kernel_initializer", "no_such_initializer", ""),
    ("kernel_regularizer", "no_such_regularizer", ""),
    ("bias_constraint", "no_such_constraint", ""),
]
INVALID_BLOCK = [
    ("num_heads", 0, POSITIVE),
    ("num_heads", 2.5, POSITIVE),
    ("intermediate_dim", 0, POSITIVE),
    ("intermediate_dim", None, POSITIVE),
    ("key_dim", 0, "expected"),
    ("key_dim", 1.5, "expected"),
    ("feature_map", "no_such_map", "expected"),
    ("num_features", -3, POSITIVE),
    ("redraw_interval", 2.5, "expected"),
    ("local_window", -1, "expected"),
    ("chunk_size", -5, "expected"),
    ("dropout", 1.5, "expected"),
    ("activation", "no_such_activation", ""),
    ("layer_norm_epsilon", 0.0, "expected"),
    ("layer_norm_epsilon", -1e-5, "expected"),
]
INVALID_EMBEDDING = [
    ("vocabulary_size", 0, POSITIVE),
    ("vocabulary_size", 2.5, POSITIVE),
    ("sequence_length", 0, "expected"),
    ("sequence_length", 1.5, "expected"),
    ("embedding_dim", -1, POSITIVE),
    ("position", "circular", "expected"),
]


def check_invalid(layer_class, valid, argument, value, expected):
    with pytest.raises((ValueError, TypeError)) as error:
        layer_class(**{**valid, argument: value})
    message = str(error.value)
    if expected:
        # The whole form: what was wrong, what would be right, what came.
        start = f"Received an invalid value for argument `{argument}`, "
        assert message.startswith(start), message
        assert expected in message, message
        assert f"Received: {argument}=" in message, message
        assert str(value) in message, message
    else:
        # Keras's own message, for an object that Keras looks up.
        assert str(value) in message, message


@pytest.mark.parametrize(("argument", "value", "expected"), INVALID_ATTENTION)
def test_attention_refuses_invalid_arguments(argument, value, expected):
    valid = {**BASE, "causal": True}
    check_invalid(PerformerAttention, valid, argument, value, expected)


@pytest.mark.parametrize(("argument", "value", "expected"), INVALID_BLOCK)
def test_block_refuses_invalid_arguments(argument, value, expected):
    valid = {"num_heads": 2, "intermediate_dim": 13, "causal": True}
    check_invalid(PerformerBlock, valid, argument, value, expected)


@pytest.mark.parametrize(("argument", "value", "expected"), INVALID_EMBEDDING)
def test_embedding_refuses_invalid_arguments(argument, value, expected):
    valid = {"vocabulary_size": 5, "sequence_length": 7, "embedding_dim": 3}
    check_invalid(TokenAndPositionEmbedding, valid, argument, value, expected)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"local_window": 4},
        {"local_window": 4, "causal": True, "feature_map": "relu"},
        {"local_window": 4, "causal": True, "feature_map": Squares()},
    ],
    ids=["bidirectional", "relu", "own-map"],
)
def test_a_window_needs_a_causal_softmax_map(kwargs):
    with pytest.raises(ValueError, match="local_window"):
        PerformerAttention(2, 3, **kwargs)
    with pytest.raises(ValueError, match="local_window"):
        PerformerBlock(2, 13, **kwargs)
    # Zero asks for nothing.
    PerformerAttention(2, 3, **{**kwargs, "local_window": 0})


def test_rotary_needs_an_even_width():
    with pytest.raises(ValueError, match="(rotary|key_dim)"):
        PerformerAttention(2, 3, rotary=True).build((2, 7, 11))


def test_block_needs_a_width_that_its_heads_divide():
    with pytest.raises(ValueError, match=r"(?s)(num_heads|key_dim).*"):
        PerformerBlock(2, 13).build((2, 7, 11))
    PerformerBlock(2, 13).build((2, 7, 12))


@pytest.mark.parametrize("layer_class", [PerformerAttention, PerformerBlock])
def test_unknown_arguments_are_refused(layer_class):
    with pytest.raises((TypeError, ValueError), match="number_of_features"):
        layer_class(2, 3, number_of_features=3)


@pytest.mark.parametrize("name", ["favor", "favor-causal", "relu", "exact"])
@pytest.mark.parametrize("kind", ["attention", "block"])
def test_inputs_of_another_width_are_refused(name, kind):
    layer = getattr(VARIANTS[name], kind)()
    layer.build((2, 7, 11))
    for width in (10, 12, 22):
        with pytest.raises(ValueError):
            layer(normal(2, 7, width))
        with pytest.raises(ValueError):
            layer(keras.Input((7, width)))


def test_a_context_of_another_width_or_batch_is_refused():
    layer = VARIANTS["favor"].attention()
    layer.build((2, 7, 11), (2, 5, 13))
    with pytest.raises(ValueError):
        layer(normal(2, 7, 11), normal(2, 5, 12))
    with pytest.raises(ValueError):
        # Values for five positions, keys for four.
        VARIANTS["favor"].attention()(
            normal(2, 7, 11), normal(2, 5, 13), normal(2, 4, 13)
        )


LAYERS = [
    (PerformerAttention, BASE),
    (PerformerBlock, {"num_heads": 2, "intermediate_dim": 13}),
    (
        TokenAndPositionEmbedding,
        {"vocabulary_size": 5, "sequence_length": 7, "embedding_dim": 3},
    ),
]


@pytest.mark.parametrize(("layer_class", "arguments"), LAYERS)
def test_every_argument_is_an_attribute_and_in_the_config(
    layer_class, arguments
):
    layer = layer_class(**arguments)
    config = layer.get_config()
    parameters = list(inspect.signature(layer_class.__init__).parameters)
    names = [n for n in parameters[1:] if n not in ("kwargs", "args")]
    assert len(names) >= 5
    for name in names:
        assert name in config, name
        assert hasattr(layer, name), name
    for name in ("name", "trainable", "dtype"):
        assert name in config
    for name, value in arguments.items():
        assert config[name] == value == getattr(layer, name)


SIGNATURES = {
    PerformerAttention: (
        "num_heads key_dim value_dim feature_map num_features causal "
        "redraw_interval local_window chunk_size rotary dropout use_bias "
        "output_shape seed kernel_initializer bias_initializer "
        "kernel_regularizer bias_regularizer activity_regularizer "
        "kernel_constraint bias_constraint"
    ),
    PerformerBlock: (
        "num_heads intermediate_dim key_dim feature_map num_features causal "
        "redraw_interval local_window chunk_size rotary dropout activation "
        "normalize_first layer_norm_epsilon use_bias seed"
    ),
    TokenAndPositionEmbedding: (
        "vocabulary_size sequence_length embedding_dim position mask_zero "
        "reverse_dtype"
    ),
}


@pytest.mark.parametrize("layer_class", SIGNATURES)
def test_arguments_stand_in_the_order_of_the_contract(layer_class):
    parameters = list(inspect.signature(layer_class.__init__).parameters)[1:]
    names = SIGNATURES[layer_class].split()
    assert parameters[: len(names)] == names


def test_call_arguments_are_those_of_the_contract():
    parameters = inspect.signature(PerformerAttention.call).parameters
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    order = [n for n, p in parameters.items() if p.kind == by_position]
    assert order[:4] == ["self", "query", "value", "key"]
    assert set(parameters) >= {
        "mask",
        "query_mask",
        "value_mask",
        "key_mask",
        "attention_mask",
        "initial_state",
        "return_state",
        "return_attention_scores",
        "use_causal_mask",
        "training",
    }
    parameters = inspect.signature(PerformerBlock.call).parameters
    assert set(parameters) >= {
        "mask",
        "initial_state",
        "return_state",
        "training",
    }


def test_the_top_level_exports_the_layers():
    import keras_performer

    for layer_class, _ in LAYERS:
        name = layer_class.__name__
        assert getattr(keras_performer, name) is layer_class
        assert name in keras_performer.__all__


# Round trips.


def test_a_post_norm_block_norms_its_output():
    block = PerformerBlock(
        2, 13, key_dim=3, num_features=26, normalize_first=False
    )
    output = to_numpy(block(normal(2, 7, 11, scale=5.0)))
    # A norm with its initial scale and offset comes last.
    np.testing.assert_allclose(output.mean(-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(output.std(-1), 1.0, atol=1e-2)


def test_a_block_without_key_dim_divides_the_width():
    block = PerformerBlock(3, 13)
    block.build((2, 7, 15))
    assert block.key_dim is None
    assert block.attention.key_dim == 5


def build_model(style):
    """One model, in the three styles of Keras."""
    layers = [
        PerformerAttention(2, 3, num_features=26, causal=True),
        PerformerBlock(2, 13, key_dim=3, num_features=26, dropout=0.1),
    ]
    if style == "sequential":
        return keras.Sequential([keras.Input((None, 11)), *layers])
    if style == "functional":
        inputs = keras.Input((None, 11))
        return keras.Model(inputs, layers[1](layers[0](inputs)))
    return Subclassed()


@keras.saving.register_keras_serializable("keras_performer_tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = PerformerAttention(2, 3, num_features=26, causal=True)
        self.second = PerformerBlock(
            2, 13, key_dim=3, num_features=26, dropout=0.1
        )

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build(input_shape)

    def call(self, inputs, training=None):
        return self.second(self.first(inputs), training=training)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("style", ["sequential", "functional", "subclassed"])
def test_a_trained_model_makes_every_round_trip(style, tmp_path):
    model = build_model(style)
    x = normal(4, 7, 11)
    model.compile("adam", "mse")
    model.fit(x, x, batch_size=2, verbose=0)
    expected = to_numpy(model(x))
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    fresh = build_model(style)
    fresh.build((None, None, 11))
    assert_differs(to_numpy(fresh(x)), expected)
    fresh.load_weights(tmp_path / "m.weights.h5")
    copies = [
        fresh,
        keras.models.load_model(tmp_path / "m.keras"),
        pickle.loads(pickle.dumps(model)),
    ]
    if style != "subclassed":
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        copies.append(clone)
    for copy in copies:
        np.testing.assert_array_equal(to_numpy(copy(x)), expected)


def test_a_users_own_map_is_saved_and_reloaded(tmp_path):
    inputs = keras.Input((7, 11))
    layer = PerformerAttention(2, 3, feature_map=Squares(), causal=True)
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "m.keras")
    revived = keras.models.load_model(tmp_path / "m.keras")
    assert type(revived.layers[1].feature_map) is Squares
    x = normal(2, 7, 11)
    np.testing.assert_array_equal(to_numpy(revived(x)), to_numpy(model(x)))


def test_a_feature_map_may_be_given_as_its_configuration():
    config = PerformerAttention(
        2, 3, feature_map=GeneralizedKernel("elu", epsilon=0.25)
    ).get_config()["feature_map"]
    config = json.loads(json.dumps(config))
    layer = PerformerAttention(2, 3, feature_map=config)
    assert layer.get_config()["feature_map"] == config
    layer.build((2, 7, 11))
    assert_differs(
        layer(normal(2, 7, 11)),
        PerformerAttention(2, 3, feature_map="elu")(normal(2, 7, 11)),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_lora_on_all_four_projections(name):
    layer = VARIANTS[name].attention()
    x = normal(2, 7, 11)
    before = to_numpy(layer(x))
    for dense in (layer.query, layer.key, layer.value, layer.attention_output):
        dense.enable_lora(3)
    # LoRA starts at zero: the first call changes nothing.
    np.testing.assert_array_equal(to_numpy(layer(x)), before)
    names = [w.path.rsplit("/", 1)[1] for w in layer.trainable_weights]
    assert sum(name.startswith("lora") for name in names) == 8
    inputs = keras.Input((7, 11))
    model = keras.Model(inputs, layer(inputs))
    frozen = [to_numpy(w.value) for w in layer.query.non_trainable_weights]
    assert len(frozen) == 1
    model.compile("sgd", "mse")
    model.fit(x, normal(2, 7, 11, seed=1), epochs=2, verbose=0)
    (kernel,) = layer.query.non_trainable_weights
    np.testing.assert_array_equal(to_numpy(kernel.value), *frozen)
    assert_differs(layer(x), before, least=1e-6)
