"""Features: unbiased estimates of their kernels."""

import math

import keras
import numpy as np
import pytest

from keras_performer import ops
from keras_performer.feature_maps import FavorPlus
from tests.testing import assert_mean
from tests.testing import to_numpy

DRAWS = 200


SIZES = [(8, 5), (8, 8), (8, 19), (16, 7), (16, 40), (64, 31), (64, 96)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dim", "num_features", "orthogonal", "antithetic"),
    [(*size, True, pairs) for size in SIZES for pairs in (True, False)]
    + [(16, 40, False, True), (16, 7, False, False)],
)
def test_the_softmax_kernel_is_unbiased(
    dim, num_features, orthogonal, antithetic
):
    rng = np.random.default_rng(dim)
    x, y = rng.normal(size=(2, dim))
    # |x + y|^2 = 1, x and y not orthogonal: the mean over draws then settles.
    size = np.linalg.norm(x + y)
    x, y = (x / size).astype("float32"), (y / size).astype("float32")
    feature_map = FavorPlus(antithetic=antithetic, orthogonal=orthogonal)
    both = keras.ops.convert_to_tensor(np.stack([x, y]))
    estimates = []
    for seed in range(DRAWS):
        projection = feature_map.draw_projection(num_features, dim, seed)
        features = np.exp(to_numpy(feature_map(both, projection)))
        assert features.shape == (2, num_features)
        estimates.append(features[0].astype("float64") @ features[1])
    assert_mean(np.array(estimates)[:, None], math.exp(x @ y))


def test_antithetic_features_have_less_variance():
    x = np.full((1, 16), 0.25, "float32") * 0.7
    spread = {}
    for antithetic in (True, False):
        feature_map = FavorPlus(antithetic=antithetic)
        estimates = []
        for seed in range(100):
            projection = feature_map.draw_projection(32, 16, seed)
            features = np.exp(to_numpy(feature_map(x, projection)))
            estimates.append(np.sum(np.square(features)))
        spread[antithetic] = np.var(estimates)
    # At |x + y|^2 = 2 about a half; 100 draws tell it from 1 (the standard
    # error of a variance of 100 draws is 14 %).
    assert spread[True] < 0.8 * spread[False]


def test_log_features_are_whole_exponents():
    projection = np.array([[1.0, 2.0], [0.5, -1.0], [-1.0, -2.0]], "float32")
    x = np.array([[3.0, -1.0]], "float32")
    product = np.array([[1.0, 2.5, -1.0]])
    expected = product - 5.0 - 0.5 * np.log(3)
    plain = ops.positive_log_features(x, projection)
    np.testing.assert_allclose(plain, expected, rtol=1e-6)
    paired = ops.positive_log_features(x, projection, antithetic=True)
    np.testing.assert_allclose(paired, expected, rtol=1e-6)


def test_generalized_features():
    projection = np.array([[1.0, 2.0], [0.5, -1.0], [-1.0, -2.0]], "float32")
    x = np.array([[3.0, -1.0]], "float32")
    features = ops.generalized_features(x, projection, keras.ops.relu, 0.5)
    expected = np.array([[1.5, 3.0, 0.5]]) / np.sqrt(3)
    np.testing.assert_allclose(features, expected, rtol=1e-6)
    features = ops.generalized_features(x, None, keras.ops.relu, 0.0)
    np.testing.assert_allclose(
        features, np.array([[3.0, 0.0]]) / np.sqrt(2), rtol=1e-6
    )


@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("length", [2, 8, 32])
def test_o26_error_of_attention_at_many_features(length, dim):
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        q, k, v = rng.normal(size=(3, 1, length, 1, dim)).astype("float32")
        feature_map = FavorPlus()
        projection = feature_map.draw_projection(4096, dim, seed)
        size = np.float32(0.5 * dim**-0.25)
        estimate = ops.kernel_attention(
            keras.ops.convert_to_tensor(q * size),
            keras.ops.convert_to_tensor(k * size),
            keras.ops.convert_to_tensor(v),
            feature_map=feature_map,
            projection=projection,
        )
        exact = to_numpy(ops.exact_attention(q * 0.5, k * 0.5, v))
        errors.append(
            np.linalg.norm(to_numpy(estimate) - exact) / np.linalg.norm(exact)
        )
    # The case's own bound; the paper's estimator reaches 0.044.
    assert np.mean(errors) < 0.08
