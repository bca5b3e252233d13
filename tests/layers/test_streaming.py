"""States carried by layers: no split of a sequence changes a result.

Case O-29 among them. The gradients of states are in `tests/ops` too.
"""

import keras
import numpy as np
import pytest

from keras_performer import saving
from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from tests.testing import ON_TENSORFLOW
from tests.testing import TraceCounter
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import compiled
from tests.testing import input_gradient
from tests.testing import normal
from tests.testing import to_numpy
from tests.testing import weight_gradients

if ON_TENSORFLOW:
    import tensorflow as tf

# Of float32 sums over a few dozen tokens, and of their gradients.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Cosines have both signs: a normaliser that almost cancels magnifies rounding.
SIGNED = {"trig": 10}
WINDOW, LENGTH = 16, 53
MAPS = ("favor+", "favor++", "favor#", "hedgehog", "trig", "relu")
WINDOWED = MAPS[:4]
KINDS = [(name, 0) for name in MAPS] + [(name, WINDOW) for name in WINDOWED]
every_kind = pytest.mark.parametrize(("name", "window"), KINDS)
both_rotary = pytest.mark.parametrize("rotary", [False, True])
kinds = pytest.mark.parametrize("kind", ["attention", "block"])


def make(name, window, rotary, kind="block", **kwargs):
    options = {
        "feature_map": name,
        "num_features": 200 if name == "trig" else 14,
        "causal": True,
        "local_window": window,
        "chunk_size": 5,
        "rotary": rotary,
        "seed": 3,
        **kwargs,
    }
    if kind == "block":
        return PerformerBlock(2, 13, key_dim=6, **options)
    return PerformerAttention(
        2, 6, bias_initializer="random_normal", **options
    )


class Joined(keras.layers.Layer):
    """Runs a layer segment by segment, each from the state before it."""

    def __init__(self, layer, cuts, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.layer, self.cuts = layer, cuts

    def build(self, shape):
        if not self.layer.built:
            self.layer.build(shape)

    def call(self, x, mask=None):
        state, outputs = None, []
        for start, end in zip(self.cuts, self.cuts[1:]):
            part = None if mask is None else mask[:, start:end]
            output, state = self.layer(
                x[:, start:end],
                mask=part,
                initial_state=state,
                return_state=True,
            )
            outputs.append(output)
        return keras.ops.concatenate(outputs, axis=1)


def by_token(layer, x, mask=None):
    """Outputs of one token after the other, from the empty state."""

    def step(x, state, mask=None):
        return layer(x, mask=mask, initial_state=state, return_state=True)

    step = compiled(step)
    if not layer.built:
        layer.build(x.shape)
    state = layer.get_initial_state(len(x))
    outputs = []
    for t in range(x.shape[1]):
        token = keras.ops.convert_to_tensor(x[:, t : t + 1])
        part = () if mask is None else (mask[:, t : t + 1],)
        output, state = step(token, state, *part)
        outputs.append(to_numpy(output))
    return np.concatenate(outputs, axis=1), state


@pytest.mark.one_in(3)
@every_kind
@both_rotary
def test_any_split_gives_the_full_pass(name, window, rotary):
    layer = make(name, window, rotary)
    x = normal(2, LENGTH, 12)
    full = to_numpy(layer(x))
    tolerance = TOLERANCE * SIGNED.get(name, 1)
    tokens, state = by_token(layer, x)
    assert_close(tokens, full, tolerance)
    np.testing.assert_array_equal(state["position"], [LENGTH] * 2)
    for cuts in ((0, 1, 20, LENGTH), (0, 16, 32, 33, LENGTH)):
        assert_close(Joined(layer, cuts)(x), full, tolerance)
    for length in (1, 17, 40):
        prefix = layer(x[:, :length])
        assert_close(prefix, full[:, :length], tolerance)


def gradients(layer, x, cotangent, mode="eager"):
    """Of the input, and of the weights eagerly."""
    of_input = compiled(input_gradient(layer), mode)
    found = {"x": to_numpy(of_input(x, cotangent))}
    if mode == "eager":
        found.update(weight_gradients(layer, cotangent, x))
    return {path.split("/", 1)[-1]: value for path, value in found.items()}


@pytest.mark.one_in(3)
@every_kind
@pytest.mark.parametrize(
    "rotary", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_gradients_flow_through_states(name, window, rotary):
    layer = make(name, window, rotary, kind="attention")
    x, cotangent = normal(2, 41, 12), normal(2, 41, 12, seed=1)
    whole = gradients(layer, x, cotangent)
    joined = gradients(Joined(layer, (0, 9, 33, 41)), x, cotangent)
    for path, value in joined.items():
        expected = whole[path.removeprefix(layer.name + "/")]
        # Relative to the largest entry; a gradient that vanishes, as of the
        # bias of the keys of a softmax, is compared with cotangents of size 1.
        scale = max(np.max(np.abs(expected)), 0.1)
        error = np.max(np.abs(value - expected)) / scale
        assert error < GRADIENT_TOLERANCE * SIGNED.get(name, 1), path


@pytest.mark.parametrize(
    ("name", "window"),
    [
        kind
        if kind == ("relu", 0)  # of favor+, tests/ops has one
        else pytest.param(*kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_gradients_flow_through_states_under_xla(name, window):
    window = window and 4
    layer = make(name, window, True, kind="attention")
    x, cotangent = normal(2, 13, 12), normal(2, 13, 12, seed=1)
    whole = gradients(layer, x, cotangent)
    # The last segment is a single token.
    joined = gradients(Joined(layer, (0, 5, 12, 13)), x, cotangent, "xla")
    tolerance = GRADIENT_TOLERANCE * SIGNED.get(name, 1)
    assert_close(joined["x"], whole["x"], tolerance)


@pytest.mark.one_in(5)
@kinds
@pytest.mark.parametrize("padding", ["left", "right", "between"])
@pytest.mark.parametrize("window", [0, 4])
def test_o29_padded_rows_are_as_if_alone(kind, padding, window):
    layer = make("favor+", window, True, kind)
    x = normal(2, 9, 12)
    mask = np.ones((2, 9), "bool")
    padded = {"left": slice(0, 3), "right": slice(6, 9), "between": [2, 4, 5]}
    mask[1, padded[padding]] = False
    alone = to_numpy(layer(x[1:, mask[1]]))
    full = to_numpy(layer(x[:1]))
    tokens, state = by_token(layer, x, mask)
    for output in (tokens, to_numpy(Joined(layer, (0, 5, 9))(x, mask=mask))):
        # 1e-4 is the case's; here it is float32's.
        assert_close(output[:1], full, TOLERANCE)
        assert_close(output[1:, mask[1]], alone, TOLERANCE)
    np.testing.assert_array_equal(state["position"], [9, 6])
    unmasked, _ = by_token(layer, x)
    if padding != "right":
        assert_differs(unmasked[1:, mask[1]], alone)


@kinds
def test_a_masked_token_leaves_the_state_of_its_row(kind):
    layer = make("favor+", 4, True, kind)
    x = normal(2, 7, 12)
    _, before = layer(x, return_state=True)
    for length in (1, 2):
        mask = np.array([[False] * length, [True] * length])
        _, after = layer(
            x[:, :length], mask=mask, initial_state=before, return_state=True
        )
        for name, value in after.items():
            old = to_numpy(before[name])
            np.testing.assert_array_equal(to_numpy(value)[0], old[0], name)
            assert np.any(to_numpy(value)[1] != old[1]), name


def test_a_state_has_one_size_and_is_never_changed():
    layer = make("favor+", 4, True, dtype="mixed_bfloat16")
    layer.build((2, None, 12))
    state = layer.get_initial_state(2)
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    # What stays of the last two blocks of 4, and 14 features of width 6.
    assert shapes == {
        "keys": (2, 8, 2, 6),
        "normalizer": (2, 2, 14),
        "position": (2,),
        "shift": (2, 2, 14),
        "sums": (2, 2, 14, 6),
        "valid": (2, 8),
        "values": (2, 8, 2, 6),
    }
    for length in (1, 3, 9):
        copy = {name: np.array(x) for name, x in state.items()}
        output, new = layer(
            normal(2, length, 12), initial_state=state, return_state=True
        )
        assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
        for name, value in new.items():
            np.testing.assert_array_equal(state[name], copy[name])
            assert tuple(value.shape) == shapes[name], name
            assert value.dtype == state[name].dtype, name
        assert keras.backend.standardize_dtype(new["sums"].dtype) == "float32"
        state = new


def test_many_steps_need_one_trace():
    layer = make("favor+", 4, True)
    layer.build((1, None, 12))
    counter = TraceCounter(
        lambda x, state: layer(x, initial_state=state, return_state=True)
    )
    step = compiled(counter)
    state = layer.get_initial_state(1)
    x = keras.ops.ones((1, 1, 12))
    for _ in range(1000):
        _, state = step(x, state)
    assert counter.count == 1
    np.testing.assert_array_equal(state["position"], [1000])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "window"), [("favor+", 0), ("favor+", 16), ("relu", 0)]
)
def test_65536_steps_do_not_drift(name, window):
    length = 2**16
    layer = make(name, window, True, kind="attention", chunk_size=128)
    x = keras.ops.convert_to_tensor(normal(1, length, 12))
    full = to_numpy(compiled(layer, "xla")(x))
    state = layer.get_initial_state(1)
    names = sorted(state)

    def run(x):
        def body(t, last, *values):
            output, new = layer(
                keras.ops.slice(x, [0, t, 0], [1, 1, 12]),
                initial_state=dict(zip(names, values)),
                return_state=True,
            )
            last = keras.ops.slice_update(last, [0, t, 0], output)
            return t + 1, last, *(new[name] for name in names)

        start = (0, keras.ops.zeros_like(x), *(state[n] for n in names))
        return keras.ops.while_loop(
            lambda t, *_: t < length, body, start
        )[1]

    tokens = to_numpy(compiled(run, "xla")(x))
    # Relative to the first outputs, which are values of single tokens: later
    # ones are means of thousands, and almost cancel.
    assert_close(tokens, full, 1e-4)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_steps_run_inside_a_while_loop(mode):
    layer = make("favor+", 4, True)
    x = normal(2, 11, 12)
    full = to_numpy(layer(x))
    names = sorted(layer.get_initial_state(2))

    def run(x):
        def body(t, outputs, *values):
            output, new = layer(
                keras.ops.slice(x, [0, t, 0], [2, 1, 12]),
                initial_state=dict(zip(names, values)),
                return_state=True,
            )
            outputs = keras.ops.slice_update(outputs, [0, t, 0], output)
            return t + 1, outputs, *(new[name] for name in names)

        state = layer.get_initial_state(2)
        start = (0, keras.ops.zeros_like(x), *(state[n] for n in names))
        return keras.ops.while_loop(lambda t, *_: t < 11, body, start)[1]

    x = keras.ops.convert_to_tensor(x)
    assert_close(compiled(run, mode)(x), full, TOLERANCE)


def functional(kind="block", **kwargs):
    """A model of a segment and a state, and the layer in it.

    The SavedModel format knows no outputs inside of others.
    """
    layer = make("favor+", 4, True, kind, **kwargs)
    layer.build((None, None, 12))
    x = keras.Input((None, 12), name="x")
    state = {
        name: keras.Input(value.shape[1:], dtype=value.dtype, name=name)
        for name, value in layer.get_initial_state(1).items()
    }
    output, new = layer(x, initial_state=state, return_state=True)
    assert {n: v.shape for n, v in new.items()} == {
        n: v.shape for n, v in state.items()
    }
    return keras.Model([x, state], {"y": output, **new}), layer


@kinds
def test_a_state_is_an_input_and_an_output_of_a_model(kind, tmp_path):
    model, layer = functional(kind)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = normal(2, 11, 12)
    full = to_numpy(layer(x))
    for each in (model, loaded):
        state, outputs = layer.get_initial_state(2), []
        for part in (x[:, :5], x[:, 5:6], x[:, 6:]):
            part = keras.ops.convert_to_tensor(part)
            state = dict(each([part, state]))
            outputs.append(to_numpy(state.pop("y")))
        assert_close(np.concatenate(outputs, axis=1), full, TOLERANCE)


@pytest.mark.tensorflow_only("a SavedModel is TensorFlow's")
def test_a_state_is_an_input_and_an_output_of_a_saved_model(tmp_path):
    model, layer = functional()
    saving.export_saved_model(model, tmp_path / "exported")
    x = normal(2, 11, 12)
    full = to_numpy(layer(x))
    plain = tf.saved_model.load(str(tmp_path / "exported"))
    reloaded = saving.load_saved_model(tmp_path / "exported")
    for each in (plain.serve, reloaded):
        state, outputs = layer.get_initial_state(2), []
        for part in (x[:, :5], x[:, 5:6], x[:, 6:]):
            state = dict(each([tf.constant(part), state]))
            outputs.append(to_numpy(state.pop("y")))
        assert_close(np.concatenate(outputs, axis=1), full, TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{"redraw_interval": 1}, {"feature_map": "favor++", "dropout": 0.0}],
)
@kinds
def test_segments_of_a_sequence_train_on_the_same_features(kind, options):
    x = normal(3, 2, 13, 12)
    whole = make(**{"name": "favor+", "window": 4, "rotary": True}, kind=kind)
    config = {**whole.get_config(), **options}
    whole, parts = (type(whole).from_config(config) for _ in range(2))
    whole.build(x[0].shape)
    parts.build(x[0].shape)
    parts.set_weights(whole.get_weights())
    held = [getattr(layer, "attention", layer) for layer in (whole, parts)]
    first = to_numpy(held[0].projection)
    for step in x:
        full = whole(step, training=True)
        state, outputs = parts.get_initial_state(2), []
        for part in (slice(0, 5), slice(5, 6), slice(6, 13)):
            output, state = parts(
                step[:, part],
                initial_state=state,
                return_state=True,
                training=True,
            )
            outputs.append(to_numpy(output))
        outputs = np.concatenate(outputs, axis=1)
        if "redraw_interval" in options:
            # Whole sequences and segments count the same steps.
            assert_close(outputs, full, TOLERANCE)
            continue
        # The statistics are those of the last segment, but within a sequence
        # nothing moves: inference by the new weights gives the same.
        again, _ = by_token(parts, step)
        assert_close(outputs, again, TOLERANCE)
    if "redraw_interval" in options:
        assert_differs(held[0].projection, first)
        np.testing.assert_array_equal(held[0].projection, held[1].projection)


def test_a_state_has_the_precision_of_the_sums():
    layer = make("favor+", 4, True, dtype="float64")
    x = normal(2, 6, 12).astype("float64")
    layer.build(x.shape)
    state = layer.get_initial_state(2)
    symbolic = layer(keras.Input((6, 12)), return_state=True)[1]
    _, new = layer(x, initial_state=state, return_state=True)
    for name, value in state.items():
        dtypes = {x.dtype for x in (value, new[name])}
        assert len(dtypes) == 1
        dtype = keras.backend.standardize_dtype(dtypes.pop())
        assert symbolic[name].dtype == dtype
        assert dtype == {"position": "int32", "valid": "bool"}.get(
            name, "float64"
        )


def test_a_call_that_is_causal_has_a_state():
    layer = PerformerAttention(2, 6, num_features=8)
    x = normal(2, 5, 12)
    _, state = layer(x, use_causal_mask=True, return_state=True)
    symbolic = layer(
        keras.Input((5, 12)), use_causal_mask=True, return_state=True
    )[1]
    for name, value in state.items():
        assert symbolic[name].shape[1:] == tuple(value.shape)[1:]


def test_a_mask_that_is_carried_along_reaches_a_block_with_a_state():
    block = make("favor+", 4, True)
    x = np.where(np.arange(7)[None, :, None] < 3, 0.0, normal(1, 7, 12))
    x = keras.layers.Masking()(x)
    _, state = block(x, return_state=True)
    _, state = block(x, initial_state=state, return_state=True)
    np.testing.assert_array_equal(state["position"], [8])


@pytest.mark.tensorflow_only("Keras's own recomputation is per backend")
def test_gradients_flow_through_states_that_are_recomputed():
    x, cotangent = normal(2, 13, 12), normal(2, 13, 12, seed=1)
    plain = make("favor+", 4, True)
    expected = gradients(Joined(plain, (0, 5, 13)), x, cotangent)["x"]
    with keras.RematScope(mode="full"):
        layer = make("favor+", 4, True)
    joined = Joined(layer, (0, 5, 13))
    joined.build(x.shape)
    layer.set_weights(plain.get_weights())
    assert_close(gradients(joined, x, cotangent)["x"], expected, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False, "local_window": 0}, "causal=True"),
        ({"feature_map": "exact", "local_window": None}, "exact"),
        ({"activity_regularizer": "l2"}, "activity_regularizer"),
    ],
)
@kinds
def test_what_has_no_state_says_so(kind, options, message):
    layer = make(**{"name": "favor+", "window": 4, "rotary": False}, kind=kind)
    layer = type(layer).from_config({**layer.get_config(), **options})
    x = normal(1, 5, 12)
    layer(x)
    for call in (
        lambda: layer(x, return_state=True),
        lambda: layer(keras.Input((5, 12)), return_state=True),
        lambda: layer.get_initial_state(1),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@kinds
def test_a_wrong_state_is_named(kind):
    layer = make("favor+", 4, False, kind)
    with pytest.raises(ValueError, match="not built"):
        layer.get_initial_state(1)
    x = normal(2, 5, 12)
    layer(x)
    state = layer.get_initial_state(3)
    with pytest.raises(ValueError, match="`initial_state`"):
        layer(x, initial_state=state)
    with pytest.raises(ValueError, match="`initial_state`"):
        layer(x, initial_state={"step": np.zeros((2,))})
    attention = make("favor+", 4, False, "attention")
    with pytest.raises(ValueError, match="return_attention_scores"):
        attention(x, return_state=True, return_attention_scores=True)
