"""Fast attention against the whole matrix, outputs and every gradient.

Sizes are distinct primes where they can be, so that no swapped axis passes.
"""

import keras
import numpy as np
import pytest

from keras_performer import FeatureMap
from keras_performer import feature_maps
from keras_performer import ops
from keras_performer.ops import reference
from tests.ops.gradients import MODES
from tests.ops.gradients import XLA_MODES
from tests.ops.gradients import differentiate
from tests.ops.sizes import BATCH
from tests.ops.sizes import DIM
from tests.ops.sizes import FEATURES
from tests.ops.sizes import HEADS
from tests.ops.sizes import WIDTH
from tests.testing import to_numpy

# Rounding of float32 in sums of a few hundred terms, relative to the largest
# entry; gradients pass through twice as many products. These are the goals
# that the design sets for inputs up to N(0, 8^2).
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


class Draw:
    """Inputs, mask, cotangent and projection of one case."""

    def __init__(
        self, name, length, source=None, scale=1.0, dim=DIM, features=FEATURES
    ):
        rng = np.random.default_rng(length)
        source = source or length

        def normal(size, width):
            draw = rng.normal(size=(BATCH, size, HEADS, width))
            return draw.astype("float32")

        self.feature_map = feature_maps.get(name)
        # What layers hand in: queries and keys times D ** -0.25.
        size = np.float32(scale * dim**-0.25)
        self.arrays = [
            normal(length, dim) * size,
            normal(source, dim) * size,
            normal(source, WIDTH),
        ]
        self.cotangent = normal(length, WIDTH)
        self.mask = rng.random((BATCH, source)) > 0.2
        self.mask[1, : source // 3] = False  # rows that see nothing
        projection = self.feature_map.draw_projection(features, dim, seed=3)
        self.projection = None if projection is None else to_numpy(projection)

    def function(self, mode, mask=None, causal=True, **options):
        """Value and gradients of the fast path, as a function."""
        attend = ops.kernel_attention
        if causal:
            attend = ops.causal_kernel_attention

        def function(q, k, v):
            return attend(
                q,
                k,
                v,
                mask,
                feature_map=self.feature_map,
                projection=self.projection,
                **options,
            )

        return differentiate(function, mode)

    def fast(self, mode, mask=None, causal=True, **options):
        run = self.function(mode, mask, causal, **options)
        return run(self.arrays, self.cotangent)

    @property
    def arrays64(self):
        return [x.astype("float64") for x in self.arrays]

    def oracle_function(self, mask=None, **options):
        """The same from the whole matrix, for float64."""

        projection = self.projection
        if projection is not None:
            projection = projection.astype("float64")

        def function(q, k, v):
            return reference.attention(
                q,
                k,
                v,
                self.feature_map,
                projection,
                key_mask=mask,
                **options,
            )

        return differentiate(function)

    def oracle(self, mask=None, **options):
        run = self.oracle_function(mask, **options)
        return run(self.arrays64, self.cotangent)


def assert_equal(actual, expected):
    for n, (a, b) in enumerate(zip(actual, expected)):
        assert a.shape == b.shape
        assert np.all(np.isfinite(a))
        # Relative to the largest entry; a gradient that vanishes (one key
        # alone has all the weight) is compared with inputs of size 1.
        error = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 0.1)
        limit = GRADIENT_TOLERANCE if n else OUTPUT_TOLERANCE
        assert error <= limit, f"{('value', 'dq', 'dk', 'dv')[n]}: {error}"


CHUNK = 16
# One chunk and less, its edges, several, and a prime.
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 67]
# (feature map, local window, chunk size)
CAUSAL = [
    ("favor+", 0, CHUNK),
    ("relu", 0, CHUNK),
    ("favor+", 7, None),
    ("favor+", CHUNK, 3 * CHUNK),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "window", "chunk"), CAUSAL)
def test_causal_equals_the_matrix_at_every_length(name, window, chunk, mode):
    options = {"local_window": window, "chunk_size": chunk}
    # A trace for each length is slow, so a static one covers two.
    lengths = LENGTHS if mode != "graph" else (1, 2 * CHUNK + 3)
    function = Draw(name, 2).function(mode, **options)
    for length in lengths:
        case = Draw(name, length)
        assert_equal(
            function(case.arrays, case.cotangent),
            case.oracle(causal=True, local_window=window),
        )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", XLA_MODES)
@pytest.mark.parametrize(("name", "window", "chunk"), CAUSAL[:3])
def test_causal_equals_the_matrix_under_xla(name, window, chunk, mode):
    case = Draw(name, 37)
    actual = case.fast(
        mode, case.mask, local_window=window, chunk_size=chunk
    )
    expected = case.oracle(case.mask, causal=True, local_window=window)
    assert_equal(actual, expected)


@pytest.mark.slow  # a compilation for each length
@pytest.mark.parametrize("mode", XLA_MODES)
@pytest.mark.parametrize(("name", "window", "chunk"), CAUSAL[:3])
def test_causal_at_every_length_under_xla(name, window, chunk, mode):
    for length in LENGTHS:
        case = Draw(name, length)
        options = {"local_window": window, "chunk_size": chunk}
        assert_equal(
            case.fast(mode, **options),
            case.oracle(causal=True, local_window=window),
        )


SCALES = (0.5, 1, 2, 4, 8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("window", [0, 32])
def test_causal_holds_for_inputs_of_any_size(window, dim):
    cases = [Draw("favor+", 149, None, s, dim, 128) for s in SCALES]
    function = cases[0].function("graph", local_window=window, chunk_size=64)
    oracle = cases[0].oracle_function(causal=True, local_window=window)
    for case in cases:
        assert_equal(
            function(case.arrays, case.cotangent),
            oracle(case.arrays64, case.cotangent),
        )


@pytest.mark.parametrize(("scale", "opposite"), [(8, False), (4, True)])
def test_first_tokens_of_many_heads_are_not_lost(scale, opposite):
    # Features of one query and one key overlap least where there is no other
    # key: among 512 such rows some products are 1e-40 of their bound.
    rng = np.random.default_rng(3)
    case = Draw("favor+", 3, dim=64, features=256)
    q, k, v = rng.normal(size=(3, 2, 3, 256, 64)).astype("float32")
    size = np.float32(scale * 64**-0.25)
    case.arrays = [q * size, (-q if opposite else k) * size, v]
    case.cotangent = np.ones_like(v)
    actual = case.fast("eager", local_window=0)
    expected = case.oracle(causal=True)
    assert np.all(np.any(actual[0] != 0, axis=-1))
    for a, b in zip(actual, expected):
        error = np.max(np.abs(a - b)) / np.max(np.abs(b))
        # Exponents are sums of terms as large as |x|^2 / 2 = 256: each is
        # rounded by 256 * 2^-24 = 1.5e-5, and a weight has a few of them.
        assert error <= 1e-4


@pytest.mark.parametrize("name", ["favor+", "relu"])
@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional_holds_for_inputs_of_any_size(masked, name):
    cases = [Draw(name, 41, 59, s) for s in SCALES]
    mask = cases[0].mask if masked else None
    function = cases[0].function("graph", mask, causal=False, chunk_size=16)
    oracle = cases[0].oracle_function(mask)
    for case in cases:
        assert_equal(
            function(case.arrays, case.cotangent),
            oracle(case.arrays64, case.cotangent),
        )


@pytest.mark.parametrize("mode", XLA_MODES)
def test_bidirectional_equals_the_matrix_under_xla(mode):
    case = Draw("favor+", 41, source=59)
    actual = case.fast(mode, case.mask, causal=False, chunk_size=16)
    assert_equal(actual, case.oracle(case.mask))


# Of these the weights have both signs. A sum that cancels would multiply the
# rounding of its terms, whatever the algorithm: here all are positive.
SIGNED = ("cos", "tanh", "identity", "gelu")
MAPS = [
    *(name for name in feature_maps.ACTIVATIONS if name not in SIGNED),
    *(feature_maps.GeneralizedKernel(name, epsilon=5.0) for name in SIGNED),
    "trig",
    feature_maps.GeneralizedKernel(keras.ops.softplus),
    feature_maps.GeneralizedKernel("relu", projected=False),
    feature_maps.FavorPlus(antithetic=False),
    feature_maps.FavorPlus(antithetic=False, orthogonal=False),
    feature_maps.FavorPlus(regularized=True, simplex=True),
]


@pytest.mark.parametrize(
    "mode", [MODES[0], pytest.param(XLA_MODES[0], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("feature_map", MAPS)
def test_every_map_equals_the_matrix(feature_map, mode):
    # For "trig" an even number, and estimates of exp(x.y) far from 0.
    scale = 0.3 if feature_map == "trig" else 1.0
    case = Draw(feature_map, 37, scale=scale, features=FEATURES + 1)
    for causal in (True, False):
        actual = case.fast(mode, case.mask, causal, chunk_size=CHUNK)
        assert_equal(actual, case.oracle(case.mask, causal=causal))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_that_cancel_give_a_finite_output(causal, dtype):
    # Two keys whose weights are 1 and -1 + 1e-4: a denominator of 1e-4.
    query = np.ones((1, 2, 1, 1))
    key = np.array([1.0, -1.0 + 1e-4]).reshape(1, 2, 1, 1)
    value = np.array([9.0, -9.0]).reshape(1, 2, 1, 1)
    arrays = [x.astype("float32") for x in (query, key, value)]
    attend = ops.causal_kernel_attention if causal else ops.kernel_attention

    def function(q, k, v):
        output = attend(
            q,
            k,
            keras.ops.cast(v, dtype),
            feature_map=feature_maps.GeneralizedKernel(
                "identity", epsilon=0.0, projected=False
            ),
        )
        return keras.ops.cast(output, "float32")

    results = differentiate(function, "graph")(arrays, np.ones((1, 2, 1, 1)))
    for result in results:
        assert np.all(np.isfinite(result))
    expected = {"float16": 65504.0, "float32": 18.0 / 1e-4}[dtype]
    # The difference of two numbers near 1 has an error of 2^-24 of them.
    np.testing.assert_allclose(results[0][0, -1], expected, rtol=2e-3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "window", "chunk"), [*CAUSAL, ("favor+", None, CHUNK)]
)
def test_a_masked_key_is_left_out(name, window, chunk):
    case = Draw(name, 67)
    causal = window is not None  # of the bidirectional case
    options = {"local_window": window} if causal else {}
    function = case.function(
        "graph", case.mask, causal, chunk_size=chunk, **options
    )
    actual = function(case.arrays, case.cotangent)
    expected = case.oracle(case.mask, causal=causal, **options)
    assert_equal(actual, expected)
    # Its own gradients are 0, and what it holds does not matter, NaN included.
    for gradient in actual[2:]:
        assert np.all(gradient[~case.mask] == 0)
    for array in case.arrays[1:]:
        array[~case.mask] = np.nan
    again = function(case.arrays, case.cotangent)
    for a, b in zip(actual, again):
        np.testing.assert_array_equal(a, b)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{"local_window": 0}, {"local_window": 7}, {"causal": False}],
    ids=["causal", "window", "bidirectional"],
)
def test_the_chunk_size_never_changes_the_result(options):
    case = Draw("favor+", 67)
    results = [
        case.fast("eager", case.mask, chunk_size=size, **options)
        for size in (1, 5, 16, 64, 200, None)
    ]
    for result in results[1:]:
        # Sums in another order: rounding alone.
        assert_equal(result, results[0])


class Directions(FeatureMap):
    """Undefined at the zero vector."""

    def __call__(self, x, projection=None, is_query=True):
        norm = keras.ops.sqrt(
            keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True)
        )
        return keras.ops.square(1.0 + x / norm)


@pytest.mark.parametrize("causal", [False, True])
def test_a_map_sees_given_tokens_only(causal):
    # 67 tokens in chunks of 16: what fills the last one is no token.
    case = Draw(Directions(), 67)
    actual = case.fast("graph", causal=causal, chunk_size=CHUNK)
    assert_equal(actual, case.oracle(causal=causal))


def test_up_to_two_windows_attention_is_exact():
    window = 17
    case = Draw("favor+", 2 * window, scale=2)
    q, k, v = (x.astype("float32") for x in case.arrays)
    actual = ops.causal_kernel_attention(
        *(keras.ops.convert_to_tensor(x) for x in (q, k, v)),
        feature_map=case.feature_map,
        projection=case.projection,
        local_window=window,
    )
    scale = np.float32(DIM**0.25)  # exact_attention scales by itself
    exact = ops.exact_attention(q * scale, k * scale, v, causal=True)
    # Rounding of float32 scores of size 16.
    np.testing.assert_allclose(actual, exact, atol=1e-5)


def test_the_feature_part_reaches_beyond_the_window():
    case = Draw("favor+", 67)
    whole = case.oracle(causal=True)[0]
    local = case.oracle(causal=True, local_window=7)[0]
    assert np.max(np.abs(whole - local)) > 1e-3


@pytest.mark.parametrize("name", ["relu", "favor+"])
def test_given_features_equal_the_recurrence(name):
    case = Draw(name, 37)
    q, k, v = (keras.ops.convert_to_tensor(x, "float32") for x in case.arrays)
    features = [
        case.feature_map(x, case.projection, is_query)
        for x, is_query in ((q, True), (k, False))
    ]
    if case.feature_map.log_space:
        features = [keras.ops.exp(x) for x in features]
    expected = reference.attention_by_token(*features, v, case.mask)
    actual = ops.causal_linear_attention(*features, v, case.mask, chunk_size=8)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    through_map = ops.causal_kernel_attention(
        q,
        k,
        v,
        case.mask,
        feature_map=case.feature_map,
        projection=case.projection,
    )
    np.testing.assert_allclose(through_map, expected, atol=1e-5)
    both = ops.linear_attention(*features, v, case.mask)
    matrix = np.einsum("bihm,bjhm->bhij", *map(np.asarray, features))
    matrix = matrix * case.mask[:, None, None, :]
    matrix = matrix / np.sum(matrix, axis=-1, keepdims=True)
    expected = np.einsum("bhij,bjhe->bihe", matrix, np.asarray(v))
    np.testing.assert_allclose(both, expected, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "window", "chunk"), CAUSAL)
def test_the_future_never_changes_the_past(name, window, chunk):
    case = Draw(name, 67)
    function = case.function("graph", local_window=window, chunk_size=chunk)
    before = function(case.arrays, case.cotangent)[0]
    for factor in (5, 20, 50):
        other = Draw(name, 67)
        for array in other.arrays:
            array[:, -1] *= factor
        after = function(other.arrays, other.cotangent)[0]
        # No stabiliser sees the last token: not even rounding changes.
        np.testing.assert_array_equal(after[:, :-1], before[:, :-1])
        assert np.max(np.abs(after[:, -1] - before[:, -1])) > 1e-3
    t = 40
    case.cotangent[:, t:] = 0
    for gradient in function(case.arrays, case.cotangent)[1:]:
        assert np.all(gradient[:, t:] == 0)
        assert np.any(gradient[:, :t] != 0)


def valid_alone(case, **options):
    """Each row's valid tokens alone, without a state; 0 where masked."""

    def function(q, k, v):
        rows = []
        for row, mask in enumerate(case.mask):
            (index,) = np.nonzero(mask)
            valid = [
                keras.ops.take(x[row : row + 1], index, axis=1)
                for x in (q, k, v)
            ]
            output = ops.causal_kernel_attention(
                *valid,
                feature_map=case.feature_map,
                projection=case.projection,
                **options,
            )
            places = np.eye(len(mask), dtype="float32")[:, index]
            rows.append(keras.ops.einsum("ij,bjhe->bihe", places, output))
        return keras.ops.concatenate(rows, axis=0)

    return differentiate(function)(case.arrays, case.cotangent)


def joined(case, cuts, states, **options):
    """A function that attends to segments, each from the state before it."""

    def function(q, k, v):
        state, outputs = None, []
        for start, end in zip(cuts, cuts[1:]):
            output, state = ops.causal_kernel_attention(
                q[:, start:end],
                k[:, start:end],
                v[:, start:end],
                None if np.all(case.mask) else case.mask[:, start:end],
                feature_map=case.feature_map,
                projection=case.projection,
                initial_state=state,
                return_state=True,
                **options,
            )
            outputs.append(output)
        states.append(state)
        output = keras.ops.concatenate(outputs, axis=1)
        # Without a window a masked token has an output of its own.
        return output * case.mask[:, :, None, None].astype("float32")

    return function


# Single tokens, an empty segment, and each token by itself.
SEGMENTS, TOKENS = (0, 1, 8, 8, 31, 67), tuple(range(42))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "window", "chunk", "cuts"),
    [(*case, SEGMENTS) for case in CAUSAL]
    + [(*CAUSAL[0], TOKENS), (*CAUSAL[2], TOKENS)],
)
def test_a_state_continues_a_sequence(name, window, chunk, masked, cuts):
    case = Draw(name, cuts[-1])
    if not masked:
        case.mask[:] = True
    options = {"local_window": window, "chunk_size": chunk}
    expected = valid_alone(case, **options)
    states = []
    function = joined(case, cuts, states, **options)
    # Gradients too: they flow back through the states.
    assert_equal(
        differentiate(function)(case.arrays, case.cotangent), expected
    )
    function(*map(keras.ops.convert_to_tensor, case.arrays))
    count = np.sum(case.mask, axis=1)
    np.testing.assert_array_equal(states[-1]["position"], count)


@pytest.mark.parametrize(
    "window", [4, pytest.param(0, marks=pytest.mark.slow)]
)
def test_a_state_continues_under_xla(window):
    cuts = (0, 7, 8, 15)  # across blocks, by one and by more
    case = Draw("favor+", cuts[-1])
    options = {"local_window": window, "chunk_size": 4}
    function = joined(case, cuts, [], **options)
    for mode in XLA_MODES[:1]:
        assert_equal(
            differentiate(function, mode)(case.arrays, case.cotangent),
            valid_alone(case, **options),
        )


def test_no_tokens_give_no_output():
    empty = keras.ops.zeros((2, 0, HEADS, DIM))
    case = Draw("favor+", 2)
    for window in (0, 4):
        output = ops.causal_kernel_attention(
            empty,
            empty,
            empty,
            feature_map=case.feature_map,
            projection=case.projection,
            local_window=window,
        )
        assert tuple(output.shape) == (2, 0, HEADS, DIM)
    some = keras.ops.ones((2, 3, HEADS, DIM))
    for query, key in ((empty, some), (some, empty)):
        output = ops.kernel_attention(
            query,
            key,
            key,
            feature_map=case.feature_map,
            projection=case.projection,
        )
        np.testing.assert_array_equal(output, keras.ops.zeros_like(query))
    case = Draw("favor+", 1)
    single = case.fast("eager")[0]
    both = case.fast("eager", causal=False)[0]
    np.testing.assert_allclose(single, both, atol=1e-6)
    np.testing.assert_allclose(single, case.arrays[2], atol=1e-6)


@pytest.mark.parametrize("name", ["favor+", "relu"])
@pytest.mark.parametrize("window", [None, 0, 7])
def test_scores_are_the_matrix(name, window):
    if window and name == "relu":
        window = 0
    case = Draw(name, 37, scale=2)
    q, k, _ = (keras.ops.convert_to_tensor(x, "float32") for x in case.arrays)
    options = {"causal": window is not None, "local_window": window or 0}
    scores = ops.attention_scores(
        q,
        k,
        case.mask,
        feature_map=case.feature_map,
        projection=case.projection,
        **options,
    )
    expected = reference.attention_matrix(
        q,
        k,
        case.feature_map,
        case.projection,
        key_mask=case.mask,
        **options,
    )
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    total = np.sum(np.asarray(scores), axis=-1)
    some = np.sum(np.asarray(expected), axis=-1) > 0
    np.testing.assert_allclose(total[some], 1.0, atol=1e-5)
    assert np.all(total[~some] == 0)


class Constant(FeatureMap):
    """Features that do not depend on the tokens: uniform attention."""

    def __call__(self, x, projection=None, is_query=True):
        return keras.ops.ones_like(x[..., :1])


def test_any_function_serves_as_a_feature_map():
    value = keras.random.normal((2, 37, HEADS, WIDTH), seed=1)
    query = keras.ops.zeros((2, 37, HEADS, DIM))
    output = ops.causal_kernel_attention(
        query, query, value, feature_map=Constant()
    )
    count = np.arange(1, 38)[None, :, None, None]
    mean = np.cumsum(np.asarray(value), axis=1) / count
    np.testing.assert_allclose(output, mean, atol=1e-5)


Q, K, V = (2, 7, 3, 8), (2, 7, 3, 8), (2, 7, 3, 5)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ((Q[1:], K, V), {}, "argument `query`"),
        ((Q, (2, 7, 3, 9), V), {}, "agree in batch"),
        ((Q, K, (2, 6, 3, 5)), {}, "agree in batch"),
        ((Q, (2, 6, 3, 8), (2, 6, 3, 5)), {}, "equal length"),
        ((Q, K, V), {"key_mask": np.ones((2, 6))}, "argument `key_mask`"),
        ((Q, K, V), {"local_window": 4}, "argument `local_window`"),
        ((Q, K, V), {"chunk_size": 0}, "argument `chunk_size`"),
    ],
)
def test_wrong_input_is_named(shapes, options, message):
    tensors = [keras.ops.ones(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        ops.causal_kernel_attention(
            *tensors, feature_map=Constant(), **options
        )
