"""The language model: its parts, its state, and what it generates."""

import json
import pickle

import keras
import numpy as np
import pytest
from keras.src.backend.common import remat

from keras_performer import FavorPlus
from keras_performer import PerformerLM
from keras_performer import saving
from keras_performer.models import generation
from keras_performer.models import sample
from tests.testing import ON_TENSORFLOW
from tests.testing import TraceCounter
from tests.testing import assert_close
from tests.testing import assert_mean
from tests.testing import compiled
from tests.testing import to_numpy

if ON_TENSORFLOW:
    import tensorflow as tf

VOCABULARY = 23
TOLERANCE = 1e-5  # float32 through two small blocks


def make(**kwargs):
    """A model whose weights are large enough for answers that vary."""
    options = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 12,
        "intermediate_dim": 13,
        "sequence_length": 40,
        "num_features": 14,
        "local_window": 4,
        "seed": 5,
        **kwargs,
    }
    if "feature_map" in kwargs:
        options["local_window"] = None  # not for all of them
    model = PerformerLM(**options)
    rng = np.random.default_rng(1)
    for weight in model.trainable_variables:
        if "kernel" in weight.path or "embedding" in weight.path:
            weight.assign(0.7 * rng.normal(size=weight.shape))
    return model


def tokens(batch, length, seed=0):
    draw = np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length))
    return draw.astype("int32")


def greedy(model, prompt, count):
    """The likeliest continuation by the whole model, token by token."""
    ids = np.asarray(prompt)[None]
    for _ in range(count):
        logits = to_numpy(model(ids))[:, -1]
        ids = np.concatenate([ids, np.argmax(logits, -1)[:, None]], axis=1)
    return ids[0, -count:]


KINDS = {
    "default": {},
    "pure": {"local_window": 0},
    "learned": {"position": "learned"},
    "sine": {"position": "sine", "tie_embeddings": False},
    "no positions": {"position": None, "redraw_interval": 2},
    "relu": {"feature_map": "relu", "activation": "relu"},
    "exact": {"feature_map": "exact", "dropout": 0.1},
    "bidirectional": {
        "causal": False,
        "local_window": None,
        "feature_map": FavorPlus(regularized=True),
        "chunk_size": 8,
        "layer_norm_epsilon": 1e-3,
    },
}
every_kind = pytest.mark.parametrize("kind", KINDS)
LONG = ("sine", "no positions")  # to compile, and much like others
STREAMING = list(KINDS)[:6]
streaming = pytest.mark.parametrize("kind", STREAMING)


@every_kind
def test_a_model_survives_its_config_and_a_file(kind, tmp_path):
    model = make(**KINDS[kind])
    x = tokens(2, 11)
    expected = to_numpy(model(x))
    assert expected.shape == (2, 11, VOCABULARY)
    config = json.loads(json.dumps(model.get_config()))
    again = PerformerLM.from_config(config)
    assert again.get_config() == model.get_config()
    assert [w.path for w in again.weights] == [w.path for w in model.weights]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is PerformerLM
    np.testing.assert_array_equal(to_numpy(loaded(x)), expected)


def test_a_config_returns_every_argument():
    given = {
        "vocabulary_size": 31,
        "num_layers": 1,
        "num_heads": 3,
        "hidden_dim": 18,
        "intermediate_dim": 7,
        "sequence_length": 9,
        "causal": True,
        "feature_map": FavorPlus(antithetic=False),
        "num_features": 5,
        "position": "learned",
        "tie_embeddings": False,
        "reversible": False,
        "dropout": 0.25,
        "redraw_interval": 7,
        "local_window": 3,
        "chunk_size": 6,
        "activation": "relu",
        "layer_norm_epsilon": 1e-3,
        "seed": 8,
        "grid": (1, 3, 3),
        "mask_zero": True,
        "name": "lm",
    }
    model = PerformerLM(**given, trainable=False, dtype="mixed_bfloat16")
    config = model.get_config()
    assert len(config.pop("frozen")) > 1  # no argument, and only there if so
    assert set(config) == {*given, "trainable", "dtype"}
    changed = ("feature_map", "activation")
    for name, value in given.items():
        if name not in changed:
            assert config[name] == value == getattr(model, name), name
    assert config["feature_map"]["config"]["antithetic"] is False
    assert config["activation"] == "relu"
    assert model.dtype_policy.name == "mixed_bfloat16"
    assert not model.trainable_variables
    block = model.blocks[0]
    for name in (
        "num_heads intermediate_dim num_features causal redraw_interval "
        "local_window chunk_size dropout layer_norm_epsilon seed"
    ).split():
        assert getattr(block, name) == given[name], name
    assert block.rotary is False


def test_a_file_keeps_what_is_frozen(tmp_path):
    model = make(num_layers=2)
    model.blocks[0].trainable = False
    model.blocks[1].attention.query.trainable = False
    model.compile("adam", "mse")
    model.train_on_batch(tokens(2, 5), np.zeros((2, 5, VOCABULARY)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    paths = [w.path for w in loaded.trainable_variables]
    assert paths == [w.path for w in model.trainable_variables]
    assert 0 < len(paths) < len(loaded.weights) / 2
    model.trainable = False
    again = PerformerLM.from_config(model.get_config())
    assert not again.trainable_variables


def test_a_model_is_cloned_and_pickled():
    model = make()
    x = tokens(2, 5)
    model.generate(x, 2, temperature=0)  # leaves compiled functions
    clone = keras.models.clone_model(model)  # a plain functional model
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone(x), model(x))
    pickled = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(pickled(x), model(x))


@pytest.mark.parametrize("feature_map", ["favor+", "relu", "exact"])
def test_zeros_are_padding_that_no_token_sees(feature_map):
    options = {"causal": False, "feature_map": feature_map, "num_layers": 2}
    model = make(**options, mask_zero=True)
    x = 1 + tokens(2, 5) % (VOCABULARY - 1)
    alone = to_numpy(model(x))
    for padding in (1, 9):
        padded = to_numpy(model(np.pad(x, [(0, 0), (0, padding)])))
        assert_close(padded[:, :5], alone, TOLERANCE)
    # A mask that is given leaves out what it leaves out beside.
    mask = np.array([[1, 1, 1, 0, 0, 1]] * 2, "bool")
    masked = to_numpy(model(np.pad(x, [(0, 0), (0, 1)]), mask=mask))
    assert_close(masked[:, :3], model(x[:, :3]), TOLERANCE)
    seen = make(**options)(np.pad(x, [(0, 0), (0, 9)]))
    assert np.abs(to_numpy(seen)[:, :5] - alone).max() > 1e-2


def test_a_step_of_padding_leaves_the_state():
    model = make(mask_zero=True)
    x = 1 + tokens(2, 7) % (VOCABULARY - 1)
    full = to_numpy(model(x))
    _, state = model.step(
        np.pad(x[:, :4], [(0, 0), (0, 3)]), model.get_initial_state(2)
    )
    np.testing.assert_array_equal(state["position"], [4, 4])
    logits, _ = model.step(x[:, 4:], state)
    assert_close(logits, full[:, 4:], TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "mask_zero"),
    [
        ("full", False),
        ("full", True),
        pytest.param("larger_than", True, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_recomputes_trains_as_another(
    mode, mask_zero, monkeypatch, tmp_path
):
    options = {"num_layers": 2, "dropout": 0.3, "redraw_interval": 1}
    plain = make(mask_zero=mask_zero, **options)
    with keras.RematScope(mode=mode, output_size_threshold=9):
        recomputed = make(mask_zero=mask_zero, **options)
    recomputed.set_weights(plain.get_weights())
    # Keras's own function, which it looks up at each call.
    counter = TraceCounter(remat.remat)
    monkeypatch.setattr(remat, "remat", counter)
    ids = tokens(4, 11)
    ids[:, 8:] = 0
    losses = []
    for model in (plain, recomputed):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        history = model.fit(
            ids, ids, batch_size=2, epochs=2, shuffle=False, verbose=0
        )
        losses.append(history.history["loss"])
        # Block by block, in each trace.
        assert (counter.count > 0) == (model is recomputed)
        assert counter.count % 2 == 0
    assert_close(losses[0], losses[1], TOLERANCE)
    for one, other in zip(plain.weights, recomputed.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    if ON_TENSORFLOW:
        path = str(tmp_path / "model")
        saving.export_saved_model(recomputed, path)
        reloaded = saving.load_saved_model(path)
        assert_close(reloaded(ids), plain(ids), TOLERANCE)


@pytest.mark.slow
def test_a_model_learns_to_count():
    ids = (np.arange(13)[None, :] + np.arange(8)[:, None]) % VOCABULARY
    model = PerformerLM(VOCABULARY, 1, 2, 16, 16, 13, seed=1, num_features=8)
    model.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.fit(ids[:, :-1], ids[:, 1:], epochs=80, verbose=0)
    # Nothing else follows: the loss of a sure answer.
    assert model.evaluate(ids[:, :-1], ids[:, 1:], verbose=0) < 0.1
    generated = model.generate(ids[:3, :4], 9, temperature=0)
    np.testing.assert_array_equal(generated, ids[:3, 4:])


@pytest.mark.one_in(3)
@streaming
def test_steps_equal_the_full_pass(kind):
    model = make(num_layers=2, **KINDS[kind])
    x = tokens(2, 19)
    full = to_numpy(model(x))
    state = model.get_initial_state(2)
    shapes = {name: value.shape for name, value in state.items()}
    outputs = []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 19)):
        logits, state = model.step(x[:, start:end], state)
        outputs.append(to_numpy(logits))
        assert {name: v.shape for name, v in state.items()} == shapes
    assert_close(np.concatenate(outputs, axis=1), full, TOLERANCE)
    np.testing.assert_array_equal(state["position"], [19, 19])
    # Padding, before and between, counts for nothing.
    padded = np.concatenate([tokens(2, 3, seed=1), x], axis=1)
    mask = np.arange(22)[None, :] >= 3
    mask = np.repeat(mask, 2, axis=0)
    logits, _ = model.step(padded, model.get_initial_state(2), mask=mask)
    assert_close(logits[:, 3:], full, TOLERANCE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind in LONG else kind
        for kind in STREAMING
    ],
)
def test_generation_equals_the_whole_model(kind):
    model = make(**KINDS[kind])
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 1, 9)]
    actual = model.generate(prompts, 8, temperature=0)
    assert actual.dtype == np.int32
    # A batch of several lengths gives each what it gets alone.
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    np.testing.assert_array_equal(actual, expected)
    assert len(np.unique(actual)) > 4  # or anything would equal it
    for side in ("left", "right"):
        ids, mask = np.zeros((3, 9), "int32"), np.zeros((3, 9))
        for row, prompt in enumerate(prompts):
            n = len(prompt)
            part = slice(9 - n, 9) if side == "left" else slice(0, n)
            ids[row, part], mask[row, part] = prompt, 1
        again = model.generate(ids, 8, temperature=0, mask=mask)
        np.testing.assert_array_equal(again, expected)


def test_a_long_prompt_is_taken_in_by_segments(monkeypatch):
    monkeypatch.setattr(generation, "SEGMENT", 16)
    monkeypatch.setattr(generation, "ROUND", 8)
    model = make()
    prompts = [tokens(1, n, seed=n)[0] for n in (50, 16, 3)]  # above 40
    actual = model.generate(prompts, 5, temperature=0)
    expected = [greedy(model, prompt, 5) for prompt in prompts]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "options", [{"local_window": 0}, {"feature_map": "relu"}]
)
def test_what_fades_counts_as_so_much_less(options):
    # Without positions a text that is read twice is one of double weight.
    model = make(position=None, **options)
    once, rest = tokens(2, 7), tokens(2, 5, seed=1)
    twice = np.concatenate([once, once], axis=1)

    def halved():
        state = model.step(twice, model.get_initial_state(2))[1]
        return model.step(rest, model.fade(state, 3, 3))[0]

    def expected():
        state = model.step(once, model.get_initial_state(2))[1]
        return model.step(rest, state)[0]

    assert_close(halved(), expected(), TOLERANCE)
    if ON_TENSORFLOW:
        gradients = []
        for function in (halved, expected):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(function()))
            gradients.append(
                tape.gradient(
                    loss, [v.value for v in model.trainable_variables]
                )
            )
        for actual, one in zip(*gradients):
            scale = np.max(np.abs(one)) + 1e-3
            # Sums of a hundred terms, of which some cancel.
            np.testing.assert_allclose(
                actual / scale, one / scale, atol=10 * TOLERANCE
            )
    # Each row by a factor of its own.
    state = model.step(twice, model.get_initial_state(2))[1]
    faded = model.fade(state, np.array([0, 6]), 6.0)
    actual, full = (model.step(rest, x)[0] for x in (faded, state))
    assert_close(actual[1], expected()[1], TOLERANCE)
    assert_close(actual[0], full[0], TOLERANCE)
    assert np.max(np.abs(full - expected())) > 1e-3
    if "feature_map" not in options:
        # Sums in log space stay as large as attention needs them.
        np.testing.assert_array_equal(
            faded["block_0_sums"], state["block_0_sums"]
        )
    assert model.fade(state, 3, None) is state
    for wrong in (-1, float("nan"), np.array([-1, 2]), "3", True, None):
        with pytest.raises(ValueError, match="`count`.*of at least 0"):
            model.fade(state, wrong, 3)
    for wrong in (0, np.array(0.0), 10**400, [3, 0], "3", True):
        with pytest.raises(ValueError, match="`half_life`.*above 0"):
            model.fade(state, 3, wrong)


class _Nothing(FavorPlus):
    def __call__(self, x, projection=None, is_query=True):
        return super().__call__(x, projection, is_query) - 1e30


def _faded_greedy(model, prompt, count, half_life, size, each=1):
    """The likeliest continuation, by segments that fade before each.

    Each new token fades what is before it by so many.
    """
    state, ids, new = model.get_initial_state(1), prompt[None], []
    parts = [ids[:, i : i + size] for i in range(0, len(prompt), size)]
    while len(new) < count:
        for part in parts:
            fading = each if new else part.shape[1]
            state = model.fade(state, fading, half_life)
            logits, state = model.step(part, state)
        parts = [np.argmax(to_numpy(logits)[:, -1:], axis=-1)]
        new.append(int(parts[0][0, 0]))
    return new


def test_generation_forgets_what_has_faded(monkeypatch):
    model = make()
    prompts = [tokens(1, n, seed=n)[0] for n in (5, 1, 7, 3, 6, 4)]
    # What has faded at once is as if it had never been there.
    near = make()
    for block in near.blocks:
        # Features of 0, as their logarithm is far below all others.
        block.attention.feature_map = _Nothing()
    actual = model.generate(prompts, 20, temperature=0, far_half_life=1e-3)
    expected = [greedy(near, prompt, 20) for prompt in prompts]
    np.testing.assert_array_equal(actual, expected)
    assert np.any(actual != model.generate(prompts, 20, temperature=0))

    monkeypatch.setattr(generation, "SEGMENT", 8)
    # Where all is seen through features a half-life tells soonest.
    model = make(local_window=0, position=None)
    prompts = [tokens(1, n, seed=n + 200)[0] for n in (50, 16, 3)]

    def expected(half_life, size, each=1):
        return [
            _faded_greedy(model, x, 12, half_life, size, each)
            for x in prompts
        ]

    for half_life, size in ((np.int64(5), 4), (30, 8), (0.5, 1)):
        actual = model.generate(
            prompts, 12, temperature=0, far_half_life=half_life
        )
        np.testing.assert_array_equal(
            actual, expected(float(half_life), size)
        )
    # What a wrong half-life, segment, or count of tokens would give.
    for wrong in ((10.0, 4), (5.0, 32), (5.0, 4, 2)):
        assert expected(*wrong) != expected(5.0, 4)
    for wrong in (0, -1.0, float("inf"), float("nan"), 2**2000, "long"):
        with pytest.raises(ValueError, match="`far_half_life`"):
            model.generate(prompts, 5, far_half_life=wrong)
    with pytest.raises(ValueError, match="`far_half_life`.*sequence again"):
        make(feature_map="exact").generate(prompts, 5, far_half_life=9)


def test_exact_attention_and_full_tables_run_anew():
    exact = make(feature_map="exact")
    prompts = [tokens(1, n, seed=n)[0] for n in (5, 2)]
    expected = [greedy(exact, prompt, 6) for prompt in prompts]
    actual = exact.generate(prompts, 6, temperature=0)
    np.testing.assert_array_equal(actual, expected)

    learned = make(position="learned", sequence_length=7)
    # Seven places serve for three tokens and four that are read after them;
    # the last one is not read.
    ids = tokens(1, 3)[0]
    assert learned._streams(7) and not learned._streams(8)
    np.testing.assert_array_equal(
        learned.generate([ids], 5, temperature=0)[0], greedy(learned, ids, 5)
    )
    for length in (4, 7, 12):
        ids = tokens(1, length)[0]
        actual = learned.generate([ids], 6, temperature=0)[0]
        for token in actual:
            # The last 7 tokens are all that the model has places for.
            expected = np.argmax(to_numpy(learned(ids[None, -7:]))[0, -1])
            assert token == expected
            ids = np.append(ids, token)
    with pytest.raises(ValueError, match="learned positions"):
        learned(ids[None])


def test_padding_is_never_drawn_and_never_read():
    model = make(mask_zero=True, tie_embeddings=False)
    # Padding would be by far the likeliest token.
    bias = np.zeros(model.vocabulary_size)
    bias[0] = 50.0
    model.head.bias.assign(bias)
    prompt = tokens(1, 5)[0] % (model.vocabulary_size - 1) + 1
    for options in ({"temperature": 0}, {"top_p": 0.9}, {"top_k": 3}):
        new = model.generate([prompt], 9, seed=3, **options)
        assert np.all(new > 0)
        # Zeros of a prompt are padding, wherever they stand.
        padded = np.insert(prompt, [0, 2, 5], 0)
        np.testing.assert_array_equal(
            model.generate([padded], 9, seed=3, **options), new
        )
    with pytest.raises(ValueError, match="none in row 0"):
        model.generate([[0, 0]], 3)


def test_generation_ends_where_a_sequence_ends():
    model = make()
    prompts = tokens(3, 4)
    free = model.generate(prompts, 8, temperature=0)
    end = int(free[0, 2])
    ended = model.generate(prompts, 8, temperature=0, end_id=end)
    for row, expected in zip(ended, free):
        (places,) = np.nonzero(expected == end)
        stop = places[0] if places.size else 8
        np.testing.assert_array_equal(row[:stop], expected[:stop])
        assert np.all(row[stop:] == end)
    assert np.all(ended[0, 2:] == end)


@pytest.mark.tensorflow_only("JAX traces a loop's body once")
def test_generation_stops_when_all_rows_have_ended():
    model = make()
    calls = TraceCounter(model._advance)
    start = (keras.ops.zeros((2, 1)),)
    options = {"temperature": 0.0, "top_p": None, "end_id": 3, "seed": 0}

    def logits(_):
        return keras.ops.one_hot([3, 3], VOCABULARY)

    def advance(token, x):
        calls.count += 1
        return (x,)

    generation._loop(start, logits, advance, 50, 64, None, options)
    assert calls.count == 1  # eagerly, the body runs once for each token


def test_the_same_seed_gives_the_same_tokens():
    model = make()
    prompt = tokens(2, 4)
    first = model.generate(prompt, 30, seed=3)
    np.testing.assert_array_equal(first, model.generate(prompt, 30, seed=3))
    assert np.any(first != model.generate(prompt, 30, seed=4))
    assert np.any(first != model.generate(prompt, 30))
    # The first tokens do not depend on how many follow.
    np.testing.assert_array_equal(
        first[:, :7], model.generate(prompt, 7, seed=3)
    )
    likeliest = model.generate(prompt, 9, temperature=0)
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}):
        np.testing.assert_array_equal(
            model.generate(prompt, 9, seed=3, **options), likeliest
        )


def test_new_weights_are_used_and_nothing_is_compiled_again():
    model = make()
    counter = TraceCounter(model._advance)
    model._advance = counter
    prompt = tokens(2, 4)
    first = model.generate(prompt, 9, temperature=0)
    traces = counter.count
    weight = model.embedding.token_embedding.embeddings
    weight.assign(weight[::-1])
    second = model.generate(prompt[:, :3], 8, temperature=0)
    assert np.any(first[:, :8] != second)
    model.generate(prompt, 5, temperature=0.7, seed=1)
    # 1,000 tokens, in one trace for the larger room that they need.
    model.generate(prompt, 1000, temperature=0)
    assert counter.count == traces + 1
    model.generate(prompt, 999, temperature=0)
    assert counter.count == traces + 1


def test_replaced_variables_are_compiled_again():
    model = make()
    prompt = tokens(2, 4)
    before = model.generate(prompt, 5, temperature=0)
    dense = model.blocks[0].output_dense
    dense.enable_lora(2)
    rng = np.random.default_rng(0)
    dense.lora_kernel_b.assign(30 * rng.normal(size=(2, 12)))
    after = model.generate(prompt, 5, temperature=0)
    assert np.any(before != after)
    expected = [greedy(model, row, 5) for row in prompt]
    np.testing.assert_array_equal(after, expected)


DRAWS = 4000


@pytest.mark.parametrize(
    ("options", "kept", "temperature"),
    [
        ({}, 5, 1.0),
        ({"temperature": 2.0}, 5, 2.0),
        ({"top_k": 2}, 2, 1.0),
        ({"top_k": 9}, 5, 1.0),
        # Probabilities are 0.5, 0.25, 0.125, 0.0625, 0.0625.
        ({"top_p": 0.49}, 1, 1.0),
        ({"top_p": 0.6}, 2, 1.0),
        ({"top_p": 0.8}, 3, 1.0),
        ({"top_p": 1.0}, 5, 1.0),
        ({"top_p": 1e-50}, 1, 1.0),  # 0 in float32
        ({"top_k": 3, "top_p": 0.8}, 2, 1.0),  # of the 3, 0.86 are in 2
    ],
)
def test_draws_have_the_probabilities_of_the_logits(
    options, kept, temperature
):
    weights = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    order = [3, 0, 4, 1, 2]
    logits = np.log(weights)[order].astype("float32") + 7
    logits = np.repeat(logits[None], DRAWS, axis=0)
    drawn = to_numpy(sample(logits, (3, 4), **options))
    share = weights ** (1 / temperature) * (np.arange(5) < kept)
    share = (share / np.sum(share))[order]
    for token in range(5):
        if share[token] in (0.0, 1.0):
            assert np.mean(drawn == token) == share[token]
        else:
            assert_mean((drawn == token).astype("float64"), share[token])
    again = to_numpy(sample(logits, (3, 5), **options))
    assert kept == 1 or np.any(drawn != again)


def test_equal_logits_are_drawn_from_as_many_as_asked_for():
    logits = np.zeros((DRAWS, 5), "float32")
    drawn = to_numpy(sample(logits, (3, 4), top_k=2))
    assert len(np.unique(drawn)) == 2
    drawn = to_numpy(sample(logits, (3, 4), top_p=0.5))  # 0.2, 0.4, 0.6
    assert len(np.unique(drawn)) == 3


def test_numpy_numbers_and_tensors_are_taken():
    model = make()
    prompt = tokens(2, 4)
    first = model.generate(prompt, 5, temperature=0.5, seed=3)
    again = model.generate(
        keras.ops.convert_to_tensor(prompt),
        np.int64(5),
        temperature=np.float32(0.5),
        seed=np.int32(3),
    )
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[]], 3), ValueError, "at least one token"),
        (([], 3), ValueError, "`prompt_ids`"),
        (([1, 2], 3), ValueError, "`prompt_ids`"),
        (([[1, VOCABULARY]], 3), ValueError, "`prompt_ids`"),
        (([[-1]], 3), ValueError, "`prompt_ids`"),
        (([[0.5]], 3), TypeError, "`prompt_ids`"),
        (([[1]], 0), ValueError, "`max_new_tokens`"),
        (([[1]], 3, -1.0), ValueError, "`temperature`"),
        (([[1]], 3, float("nan")), ValueError, "`temperature`"),
        (([[1]], 3, 1.0, 0), ValueError, "`top_k`"),
        (([[1]], 3, 1.0, None, 0.0), ValueError, "`top_p`"),
        (([[1]], 3, 1.0, None, 1.5), ValueError, "`top_p`"),
        (([[1]], 3, 1.0, None, None, VOCABULARY), ValueError, "`end_id`"),
        (([[1]], 3, 1.0, None, None, None, 0.5), ValueError, "`seed`"),
        (
            ([[1]], 3, 1.0, None, None, None, 1, [[1, 1]]),
            ValueError,
            "`mask`",
        ),
        (
            ([[1, 1], [1]], 3, 1.0, None, None, None, 1, [[1, 1]]),
            ValueError,
            "`prompt_ids`",
        ),
        (
            ([[1, 1]], 3, 1.0, None, None, None, 1, [[0, 0]]),
            ValueError,
            "at least one token",
        ),
    ],
)
def test_a_wrong_prompt_or_option_is_named(arguments, error, message):
    model = make()
    with pytest.raises(error, match=message):
        model.generate(*arguments)


def test_what_cannot_generate_says_so():
    model = make(**KINDS["bidirectional"])
    with pytest.raises(ValueError, match="not causal"):
        model.generate([[1]], 3)
    with pytest.raises(ValueError, match="causal=True"):
        model.get_initial_state(1)
    with pytest.raises(ValueError, match="exact"):
        make(feature_map="exact").get_initial_state(1)
    model = make()
    larger = make(num_layers=2).get_initial_state(1)
    smaller = dict(list(model.get_initial_state(1).items())[:-1])
    for state in (None, {}, larger, smaller):
        with pytest.raises(ValueError, match="`state`"):
            model.step([[1]], state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocabulary_size": 0}, ValueError, "vocabulary_size"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"hidden_dim": 13}, ValueError, "hidden_dim"),
        ({"position": "absolute"}, ValueError, "position"),
        ({"reversible": True}, ValueError, "reversible"),
        ({"tie_embeddings": 1}, TypeError, "tie_embeddings"),
        ({"causal": None}, TypeError, "causal"),
        ({"num_features": 0}, ValueError, "num_features"),
        ({"local_window": -1}, ValueError, "local_window"),
    ],
)
def test_a_wrong_argument_is_named(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


def test_low_precision_generates_the_same():
    model = make()
    prompt = tokens(2, 6)
    expected = model.generate(prompt, 12, temperature=0)
    config = {**model.get_config(), "dtype": "mixed_bfloat16"}
    half = PerformerLM.from_config(config)
    half.set_weights(model.get_weights())
    actual = half.generate(prompt, 12, temperature=0)
    logits = half(prompt)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    # Not all tokens: where two are about as likely, rounding decides.
    assert np.mean(actual[:, :4] == expected[:, :4]) == 1.0


@pytest.mark.one_in(2)
@pytest.mark.tensorflow_only("a SavedModel is TensorFlow's")
@pytest.mark.parametrize(
    "kind",
    ["default", "exact", pytest.param("learned", marks=pytest.mark.slow)],
)
def test_a_saved_model_generates(kind, tmp_path):
    model = make(**KINDS[kind])
    saving.export_saved_model(model, tmp_path / "exported")
    plain = tf.saved_model.load(str(tmp_path / "exported"))

    def generate(prompt, count, temperature=0.0, seed=0):
        arguments = (prompt, count, np.float32(temperature), seed)
        return plain.generate(*map(tf.constant, arguments)).numpy()

    for length, count in ((6, 12), (1, 3)):
        prompt = tokens(2, length)
        expected = model.generate(prompt, count, temperature=0)
        np.testing.assert_array_equal(generate(prompt, count), expected)
    drawn = generate(prompt, 20, 1.0, 3)
    np.testing.assert_array_equal(drawn, generate(prompt, 20, 1.0, 3))
    assert np.any(drawn != generate(prompt, 20, 1.0, 4))
    for wrong, message in (
        ((prompt[:, :0], 3), "empty"),
        ((prompt, 0), "num_tokens"),
        ((prompt, 3, -1.0), "temperature"),
        ((prompt - 99, 3), "ids >= 0"),
        ((prompt + 99, 3), "vocabulary_size"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            generate(*wrong)
    if kind == "learned":
        with pytest.raises(tf.errors.InvalidArgumentError, match="positions"):
            generate(prompt, 40)
    reloaded = saving.load_saved_model(tmp_path / "exported")
    assert_close(reloaded(prompt), model(prompt), TOLERANCE)


@pytest.mark.tensorflow_only("JAX has no GradientTape")
def test_segments_train_as_the_whole_sequence():
    model = make(num_layers=2)
    x, y = tokens(2, 24), tokens(2, 24, seed=1)

    def loss(logits, y):
        return tf.reduce_sum(
            keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
        )

    with tf.GradientTape() as tape:
        whole = loss(model(x), y)
    expected = tape.gradient(whole, model.trainable_variables)
    with tf.GradientTape() as tape:
        state, total = model.get_initial_state(2), 0.0
        for part in (slice(0, 9), slice(9, 10), slice(10, 24)):
            logits, state = model.step(x[:, part], state)
            total += loss(logits, y[:, part])
    actual = tape.gradient(total, model.trainable_variables)
    for variable, a, b in zip(model.trainable_variables, actual, expected):
        a, b = (to_numpy(tf.convert_to_tensor(g)) for g in (a, b))
        scale = max(np.max(np.abs(b)), 1e-2)  # keys' biases have none
        assert np.max(np.abs(a - b)) < 1e-4 * scale, variable.path


@pytest.mark.tensorflow_only("JAX has no GradientTape")
def test_padding_beside_a_full_table_has_no_gradient():
    model = make(position="learned", sequence_length=6)
    ids, state = tokens(2, 6), model.get_initial_state(2)
    mask = np.ones((2, 6), "bool")
    mask[1, :4] = False
    _, state = model.step(ids, state, mask=mask)
    with tf.GradientTape() as tape:
        mask = np.array([[False], [True]])
        logits, _ = model.step(ids[:, :1], state, mask=mask)
        loss = tf.reduce_sum(logits[1:])
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert np.all(np.isfinite(tf.convert_to_tensor(gradient)))


def test_a_step_compiles_for_any_length():
    model = make()
    step = compiled(model.step, "xla")
    x = tokens(2, 9)
    logits, state = step(x, model.get_initial_state(2))
    assert_close(logits, to_numpy(model(x)), TOLERANCE)
    logits, _ = step(tokens(2, 1), state)
    both = np.concatenate([x, tokens(2, 1)], axis=1)
    assert_close(logits, to_numpy(model(both))[:, -1:], TOLERANCE)
