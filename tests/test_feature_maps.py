"""Feature maps: names, configs, a user's own, wrong input."""

import json

import keras
import numpy as np
import pytest

import keras_performer
from keras_performer import FeatureMap
from keras_performer import feature_maps
from tests.testing import to_numpy

SHORT_NAMES = (
    "relu elu exp sigmoid gelu abs cos tanh identity square".split()
)


@keras.saving.register_keras_serializable(package="tests")
def cubes(x):
    return x * x * x


@keras.saving.register_keras_serializable(package="tests")
class Powers(FeatureMap):
    """The first powers of every entry: a user's own map."""

    def __init__(self, count=2):
        self.count = count

    def __call__(self, x, projection=None, is_query=True):
        powers = [keras.ops.abs(x) ** n for n in range(self.count)]
        return keras.ops.concatenate(powers, axis=-1)

    def get_config(self):
        return {"count": self.count}


@keras.saving.register_keras_serializable(package="tests")
class Shifted(feature_maps.FavorPlus):
    """A softmax map with a projection of its own."""

    def draw_projection(self, num_features, dim, seed=None):
        return 0.5 * super().draw_projection(num_features, dim, seed)


MAPS = [
    feature_maps.FavorPlus(),
    feature_maps.FavorPlus(False, False, True),
    feature_maps.FavorPlus(simplex=True, temperature=0.5, far_weight=0.1),
    feature_maps.FavorPlusPlus(antithetic=False, temperature=2),
    feature_maps.FavorSharp(orthogonal=False),
    feature_maps.TrigonometricFeatures(simplex=True),
    feature_maps.LearnedFeatures(far_weight=0.25),
    feature_maps.GeneralizedKernel("elu", 0.25, projected=False),
    feature_maps.GeneralizedKernel(cubes),
    feature_maps.Exact(),
    Powers(3),
]


@pytest.mark.parametrize("feature_map", MAPS, ids=lambda m: type(m).__name__)
def test_a_config_brings_back_the_map(feature_map):
    config = json.loads(json.dumps(feature_maps.serialize(feature_map)))
    for again in (feature_maps.deserialize(config), feature_maps.get(config)):
        assert type(again) is type(feature_map)
        assert again.get_config() == feature_map.get_config()
        assert vars(again) == vars(feature_map)


def test_names():
    others = "favor+ favor++ favor# trig hedgehog exact".split()
    expected = sorted([*others, *SHORT_NAMES])
    assert feature_maps.names() == expected
    assert isinstance(feature_maps.get("favor+"), feature_maps.FavorPlus)
    for name in SHORT_NAMES:
        kernel = feature_maps.get(name)
        assert isinstance(kernel, feature_maps.GeneralizedKernel)
        assert kernel.activation == name
        assert kernel.epsilon == 1e-3 and kernel.projected
    assert isinstance(feature_maps.get(Powers), Powers)
    mine = Powers()
    assert feature_maps.get(mine) is mine


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: feature_maps.FavorPlus(antithetic=1), "antithetic"),
        (lambda: feature_maps.FavorPlus(simplex=None), "simplex"),
        (
            lambda: feature_maps.FavorPlus(orthogonal=False, simplex=True),
            "simplex",
        ),
        (lambda: feature_maps.FavorPlus(temperature=0), "temperature"),
        (lambda: feature_maps.FavorPlusPlus(far_weight=-1.0), "far_weight"),
        (lambda: feature_maps.LearnedFeatures(None), "far_weight"),
        (
            lambda: feature_maps.TrigonometricFeatures().draw_projection(5, 4),
            "num_features",
        ),
        (
            lambda: feature_maps.LearnedFeatures().weight_specs(1, 5, 4),
            "num_features",
        ),
        *(
            (
                lambda name=name: keras_performer.PerformerAttention(
                    2, 4, feature_map=name, num_features=5
                ),
                "num_features",
            )
            for name in ("trig", "hedgehog")
        ),
        *(
            (
                lambda e=e: feature_maps.GeneralizedKernel(epsilon=e),
                "epsilon",
            )
            for e in (-1.0, np.inf, np.nan, True, "1")
        ),
    ],
)
def test_a_wrong_argument_of_a_map_is_named(make, argument):
    with pytest.raises((TypeError, ValueError), match=f"`{argument}`"):
        make()


FUNCTIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "abs": np.abs,
    "cos": np.cos,
    "tanh": np.tanh,
    "identity": lambda x: x,
    "square": np.square,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_generalized_kernels_apply_their_function(name):
    kernel = feature_maps.get(name)
    x = keras.random.normal((2, 3, 5, 7), seed=1)
    projection = kernel.draw_projection(11, 7, seed=2)
    product = to_numpy(x) @ to_numpy(projection).T
    expected = (FUNCTIONS[name](product) + 1e-3) / np.sqrt(11)
    features = to_numpy(kernel(x, projection))
    if kernel.log_space:
        features = np.exp(features)
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SHORT_NAMES)
@pytest.mark.parametrize("causal", [True, False])
def test_every_kernel_gives_finite_outputs(name, causal):
    layer = keras_performer.PerformerAttention(
        2, 5, feature_map=name, num_features=13, causal=causal
    )
    x = keras.random.normal((2, 19, 7), seed=3)
    assert np.all(np.isfinite(to_numpy(layer(x))))
    scores = to_numpy(layer(x, return_attention_scores=True)[1])
    np.testing.assert_allclose(np.sum(scores, axis=-1), 1.0, rtol=1e-3)
    assert np.all(np.isfinite(to_numpy(layer(keras.ops.zeros_like(x)))))


def test_unprojected_kernels_have_no_projection():
    kernel = feature_maps.GeneralizedKernel(projected=False)
    layer = keras_performer.PerformerAttention(2, 5, feature_map=kernel)
    layer.build((None, None, 7))
    assert layer.projection is None
    assert layer.count_params() == 4 * (7 * 10) + 3 * 10 + 7


@pytest.mark.parametrize(
    "feature_map",
    [Powers(3), Shifted(), cubes],
    ids=["powers", "shifted", "cubes"],
)
def test_ones_own_map_works_saves_and_reloads(feature_map, tmp_path):
    if feature_map is cubes:
        feature_map = feature_maps.GeneralizedKernel(cubes, 2.0)
    layer = keras_performer.PerformerAttention(
        2, 5, feature_map=feature_map, num_features=13, causal=True
    )
    model = keras.Sequential([keras.Input((None, 7)), layer])
    x = keras.random.normal((2, 19, 7), seed=3)
    expected = to_numpy(model(x))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert vars(again.layers[0].feature_map) == vars(feature_map)
    np.testing.assert_array_equal(to_numpy(again(x)), expected)


def test_only_softmax_maps_take_a_window():
    assert Shifted().estimates_softmax
    keras_performer.PerformerAttention(
        2, 5, feature_map=Shifted(), causal=True, local_window=4
    )
    with pytest.raises(ValueError, match="local_window"):
        keras_performer.PerformerAttention(
            2, 5, feature_map=Powers(), causal=True, local_window=4
        )


@pytest.mark.parametrize(
    ("identifier", "error"),
    [("favour", ValueError), (3, TypeError), (None, TypeError)],
)
def test_unknown_identifiers_are_named(identifier, error):
    with pytest.raises(error, match="argument `feature_map`"):
        feature_maps.get(identifier)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: feature_maps.FavorPlus(1), TypeError, "antithetic"),
        (
            lambda: feature_maps.GeneralizedKernel("r"),
            ValueError,
            "activation",
        ),
        (lambda: feature_maps.GeneralizedKernel(3), TypeError, "activation"),
        (
            lambda: feature_maps.GeneralizedKernel(epsilon=-1),
            ValueError,
            "epsilon",
        ),
        (
            lambda: feature_maps.GeneralizedKernel(projected="no"),
            TypeError,
            "projected",
        ),
        (
            lambda: feature_maps.deserialize(
                keras.saving.serialize_keras_object(keras.layers.Dense(2))
            ),
            TypeError,
            "config",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, name):
    with pytest.raises(error, match=f"argument `{name}`"):
        call()


def test_the_base_class_says_what_is_missing():
    with pytest.raises(NotImplementedError, match="__call__"):
        FeatureMap()(None)


def test_a_projection_needs_its_shape():
    with pytest.raises(TypeError, match="`projection_shape` and"):

        class Half(FeatureMap):
            def draw_projection(self, num_features, dim, seed=None):
                return keras.ops.ones((num_features, dim))
