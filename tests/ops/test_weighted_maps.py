"""Maps with weights of their own: every gradient, through every path."""

import keras
import numpy as np
import pytest

from keras_performer import feature_maps
from keras_performer import ops
from keras_performer.ops import reference
from keras_performer.ops.chunks import BoundMap
from tests.ops.gradients import ON_JAX
from tests.ops.gradients import differentiate
from tests.testing import to_numpy

BATCH, HEADS, DIM, WIDTH, FEATURES, LENGTH = 2, 3, 8, 5, 14, 37

MAPS = {
    "favor+ trained": feature_maps.FavorPlus(temperature=0.7, far_weight=0.3),
    "favor++": feature_maps.FavorPlusPlus(),
    "favor++ trained": feature_maps.FavorPlusPlus(
        simplex=True, temperature=1.2, far_weight=2.0
    ),
    "favor#": feature_maps.FavorSharp(),
    "hedgehog": feature_maps.LearnedFeatures(far_weight=0.5),
    "trig": feature_maps.TrigonometricFeatures(),
}
# Of these the output is no function that is differentiated.
CONSTANT = ("a", "log_psi")
# These are kept as a part of what they stand for.
SCALED = ("log_temperature", "log_far_weight")


class Case:
    def __init__(self, name):
        rng = np.random.default_rng(3)

        def normal(*shape, size=1.0):
            return (size * rng.normal(size=shape)).astype("float32")

        self.feature_map = MAPS[name]
        specs = self.feature_map.weight_specs(HEADS, FEATURES, DIM)
        self.names = sorted(specs)
        weights = [
            normal(
                *specs[n].shape,
                size=0.3 / (feature_maps.LOG_SCALE if n in SCALED else 1),
            )
            for n in self.names
        ]
        if "a" in self.names:
            index = self.names.index("a")
            weights[index] = -np.abs(weights[index]) * 0.2
        # Sums of sines and cosines cancel where the kernel is small: inputs
        # for which they do not, or nothing is left to compare.
        size = DIM**-0.25 * (0.3 if name == "trig" else 1.0)
        self.arrays = [
            normal(BATCH, LENGTH, HEADS, DIM, size=size),
            normal(BATCH, LENGTH, HEADS, DIM, size=size),
            normal(BATCH, LENGTH, HEADS, WIDTH),
            *weights,
        ]
        self.cotangent = normal(BATCH, LENGTH, HEADS, WIDTH)
        self.mask = rng.random((BATCH, LENGTH)) > 0.2
        self.mask[1, : LENGTH // 3] = False
        projection = self.feature_map.draw_projection(FEATURES, DIM, seed=3)
        self.projection = None if projection is None else to_numpy(projection)

    def weights(self, tensors):
        weights = dict(zip(self.names, tensors, strict=True))
        for name in set(CONSTANT) & set(weights):
            # JAX and TensorFlow differ in what no output depends on.
            weights[name] = keras.ops.stop_gradient(weights[name])
        return weights

    def fast(self, mode, causal, window):
        def function(q, k, v, *weights):
            options = {"local_window": window} if causal else {}
            attend = ops.causal_kernel_attention
            if not causal:
                attend = ops.kernel_attention
            output = attend(
                q,
                k,
                v,
                self.mask,
                feature_map=self.feature_map,
                projection=self.projection,
                weights=self.weights(weights),
                chunk_size=7,
                **options,
            )
            # Nothing more than 0 of each, so that each has a gradient.
            return output + 0.0 * sum(keras.ops.sum(w) for w in (q, *weights))

        return differentiate(function, mode)(self.arrays, self.cotangent)

    def oracle(self, causal, window):
        projection = self.projection
        if projection is not None:
            projection = projection.astype("float64")

        def function(q, k, v, *weights):
            output = reference.attention(
                q,
                k,
                v,
                BoundMap(self.feature_map, self.weights(weights)),
                projection,
                key_mask=self.mask,
                causal=causal,
                local_window=window,
            )
            return output + 0.0 * sum(keras.ops.sum(w) for w in (q, *weights))

        arrays = [x.astype("float64") for x in self.arrays]
        return differentiate(function)(arrays, self.cotangent)


def combinations():
    """All paths compiled by XLA; two maps, of each kind, eagerly too."""
    for name, feature_map in MAPS.items():
        for causal, window in ((True, 0), (True, 5), (False, 0)):
            if window and not feature_map.allows_window:
                continue
            yield name, causal, window, "graph" if ON_JAX else "xla"
            if name in ("favor++ trained", "hedgehog") and not ON_JAX:
                yield name, causal, window, "eager"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "causal", "window", "mode"), list(combinations())
)
def test_every_gradient_is_the_oracles(name, causal, window, mode):
    case = Case(name)
    fast = case.fast(mode, causal, window)
    oracle = case.oracle(causal, window)
    labels = ["value", "dq", "dk", "dv", *case.names]
    for label, actual, expected in zip(labels, fast, oracle, strict=True):
        assert np.all(np.isfinite(actual))
        error = np.max(np.abs(actual - expected))
        # Where a weight cancels its gradient is 0 but for rounding, which is
        # that of the logarithm times LOG_SCALE.
        least = 0.1 * (feature_maps.LOG_SCALE if label in SCALED else 1)
        error /= max(np.max(np.abs(expected)), least)
        # Rounding of float32, as for maps without weights.
        limit = 1e-5 if label == "value" else 1e-4
        assert error <= limit, (label, error)
    if window and "log_far_weight" in case.names:
        gradient = oracle[labels.index("log_far_weight")]
        assert np.min(np.abs(gradient)) > 1e-3


@pytest.mark.parametrize("name", ["favor+ trained", "hedgehog"])
def test_a_far_weight_cancels_without_a_window(name):
    case = Case(name)
    gradient = case.fast("graph", True, 0)[4:][
        case.names.index("log_far_weight")
    ]
    # Rounding (1e-4, as of other gradients, times LOG_SCALE): what it scales
    # is numerator and normaliser alike.
    np.testing.assert_allclose(gradient, 0.0, atol=1e-3)


def test_near_zero_far_weight_is_the_window_alone():
    case = Case("favor+ trained")
    index = 3 + case.names.index("log_far_weight")
    q, k, v = case.arrays[:3]
    exact = to_numpy(
        ops.exact_attention(q * DIM**0.25, k * DIM**0.25, v, causal=True)
    )
    window = 16
    case.arrays[index][:] = -60.0 / feature_maps.LOG_SCALE
    case.mask[:] = True
    output = case.fast("graph", True, window)[0]
    # The first two blocks see all there is.
    np.testing.assert_allclose(
        output[:, : 2 * window], exact[:, : 2 * window], atol=1e-5
    )
    bare = reference.attention_matrix(
        *(keras.ops.convert_to_tensor(x) for x in (q, k)),
        feature_maps.FavorPlus(),
        case.projection,
        causal=True,
        local_window=window,
    )
    i = np.arange(LENGTH)
    near = i[None, :] // window >= i[:, None] // window - 1
    bare = to_numpy(bare) * near
    bare /= np.sum(bare, axis=-1, keepdims=True)
    np.testing.assert_allclose(
        output, np.einsum("bhij,bjhe->bihe", bare, v), atol=1e-5
    )
