"""Feature maps that adapt to their inputs: what a layer does for them."""

import keras
import numpy as np
import pytest

import keras_performer
from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from tests.testing import ON_TENSORFLOW
from tests.testing import assert_close
from tests.testing import assert_differs
from tests.testing import normal
from tests.testing import to_numpy

if ON_TENSORFLOW:
    import tensorflow as tf

X = normal(4, 7, 12)


def attention(feature_map="favor++", **kwargs):
    kwargs = {"num_features": 10, "causal": True, "local_window": 0, **kwargs}
    layer = PerformerAttention(2, 4, feature_map=feature_map, **kwargs)
    layer.build(X.shape)
    return layer


def a_of(layer):
    return to_numpy(layer._feature_weights["a"])


def expected_a(layer, x, mask=None, scale=1.0):
    """A of each head for all valid pairs of queries and keys, literally."""
    valid = np.ones(x.shape[:2], "bool") if mask is None else mask
    size = scale * layer.key_dim**-0.25
    q, k = (to_numpy(f(x))[valid] * size for f in (layer.query, layer.key))
    pairs = q[:, None] + k[None, :]  # [n, n, H, D]
    phi = np.mean(np.sum(np.square(pairs), axis=-1), axis=(0, 1))
    p = phi / layer.key_dim
    return (1 - 2 * p - np.sqrt((2 * p + 1) ** 2 + 8 * p)) / 16


def test_a_step_uses_what_the_steps_before_it_saw():
    layer = attention()
    plain = attention("favor+")
    for name in ("query", "key", "value", "attention_output"):
        getattr(plain, name).set_weights(getattr(layer, name).get_weights())
    plain.projection.assign(layer.projection)
    # Nothing seen yet: A is 0, which is FAVOR+, however large the input.
    assert_close(layer(X, training=True), plain(X), 1e-6)
    np.testing.assert_array_equal(a_of(layer), 0.0)
    layer(X * 3, training=True)
    assert_close(a_of(layer), expected_a(layer, X), 1e-4)
    assert np.ptp(a_of(layer)) > 1e-4  # each head its own
    assert_differs(layer(X), plain(X))


def test_inference_changes_nothing():
    layer = attention()
    layer(X, training=True)
    before = layer.get_weights()
    for _ in range(3):
        layer(X * 5, training=False)
    for one, other in zip(layer.get_weights(), before):
        np.testing.assert_array_equal(one, other)


def test_the_average_runs_over_steps():
    layer = attention()
    inputs = [X, X * 2, X * 0.5]
    for x in inputs:
        layer(x, training=True)
    layer(X, training=True)  # adopts what the three have given
    # Equal numbers of tokens; the last of three counts most.
    weights = np.array([0.99**2, 0.99, 1.0])
    tokens = np.repeat(weights / np.sum(weights), X.shape[0] * X.shape[1])
    size = 4**-0.25
    moments = []
    for f in (layer.query, layer.key):
        z = np.concatenate([to_numpy(f(x)) for x in inputs]) * size
        z = z.reshape(-1, 2, 4)
        tokens = tokens / np.sum(tokens)
        moments.append(
            (
                np.einsum("n,nhd->hd", tokens, z),
                np.einsum("n,nhd->hd", tokens, np.square(z)),
            )
        )
    (mean_q, square_q), (mean_k, square_k) = moments
    phi = np.sum(square_q + square_k + 2 * mean_q * mean_k, axis=-1)
    expected = to_numpy(keras_performer.ops.optimal_a(phi, 4))
    assert_close(a_of(layer), expected, 1e-4)


def test_masked_tokens_are_not_seen():
    mask = np.ones((4, 7), "bool")
    mask[1, 4:] = mask[3, :2] = False
    x = np.where(mask[:, :, None], X, 1e6).astype("float32")
    layer = attention()
    layer(x, mask=mask, training=True)
    layer(x, mask=mask, training=True)
    assert_close(a_of(layer), expected_a(layer, X, mask), 1e-4)
    # A step without a single valid token leaves all as it was.
    a = a_of(layer)
    layer(x, mask=np.zeros_like(mask), training=True)
    layer(x, mask=mask, training=True)
    assert_close(a_of(layer), a, 1e-6)
    assert np.all(np.isfinite(a_of(layer)))


@pytest.mark.parametrize("name", ["favor++", "favor#"])
def test_the_future_does_not_change_the_past_in_training(name):
    layer = attention(name)
    layer(X, training=True)
    before = layer.get_weights()
    other = X.copy()
    other[:, 3:] *= 5.0
    outputs = []
    for x in (X, other):
        layer.set_weights(before)
        outputs.append(to_numpy(layer(x, training=True)))
    np.testing.assert_array_equal(outputs[0][:, :3], outputs[1][:, :3])
    assert_differs(outputs[0][:, 3:], outputs[1][:, 3:])


def test_scaling_follows_queries_and_keys_of_its_head():
    layer = attention("favor#")
    rng = np.random.default_rng(2)
    for dense, size in ((layer.query, 0.2), (layer.key, 2.0)):
        kernel = rng.normal(size=dense.kernel.shape)
        dense.kernel.assign(size * kernel.astype("float32"))
    layer.calibrate(X)
    size = layer.key_dim**-0.25
    squares_x, squares_y = (
        np.mean(np.square(to_numpy(f(X)) * size), axis=(0, 1))
        for f in (layer.query, layer.key)
    )  # [H, D]
    weights = {k: to_numpy(v) for k, v in layer._feature_weights.items()}
    psi = (squares_y / squares_x) ** 0.25
    assert np.all(psi > 1)
    assert_close(weights["log_psi"], np.log(psi), 1e-5)
    mean_x, mean_y = (
        np.mean(to_numpy(f(X)) * size, axis=(0, 1))
        for f in (layer.query, layer.key)
    )
    scaled = np.square(psi) * squares_x + squares_y / np.square(psi)
    phi = np.sum(scaled + 2 * mean_x * mean_y, axis=-1)
    expected = to_numpy(keras_performer.ops.optimal_a(phi, 4))
    assert_close(weights["a"], expected, 1e-5)


def test_the_best_a_is_that_of_the_trained_temperature():
    layer = attention(keras_performer.FavorPlusPlus(temperature=1.7))
    layer.calibrate(X)
    expected = expected_a(layer, X, scale=1.7)
    assert_close(a_of(layer), expected, 1e-4)


@pytest.mark.parametrize("name", ["favor++", "favor#"])
def test_a_step_that_overflows_is_left_out(name):
    layer = attention(name)
    layer(X, training=True)
    layer(X, training=True)
    before = a_of(layer)
    for broken in (np.inf, np.nan, 1e30):
        x = X.copy()
        x[0, 0, 0] = broken
        layer(x, training=True)
    layer(X, training=True)
    for weight in layer.non_trainable_weights:
        assert np.all(np.isfinite(to_numpy(weight)))
    # The average of what is finite: nothing but X was seen.
    assert_close(a_of(layer), before, 1e-5)
    with pytest.raises(ValueError, match="argument `data`.*finite"):
        layer.calibrate(x)


def test_huge_inputs_leave_features_finite():
    layer = attention()
    layer.calibrate(X * 1e8)
    assert np.all(np.isfinite(a_of(layer)))
    assert np.all(np.isfinite(to_numpy(layer(X))))
    assert np.all(np.abs(to_numpy(layer(X))) > 0)


@pytest.mark.tensorflow_only("MirroredStrategy is TensorFlow's")
def test_replicas_add_up_what_they_see(two_replicas):
    def model_of(block):
        inputs = keras.Input(X.shape[1:])
        model = keras.Model(inputs, block(inputs))
        model.compile("sgd", "mse")
        return model

    def block():
        return PerformerBlock(2, 13, feature_map="favor#", seed=3)

    with two_replicas.scope():
        layer = block()
        model = model_of(layer)
    single = block()
    alone = model_of(single)
    alone.set_weights(model.get_weights())
    x = np.concatenate([X, X * 2])
    model.fit(x, x, batch_size=4, verbose=0, shuffle=False)
    alone.fit(x, x, batch_size=4, verbose=0, shuffle=False)
    for name in ("_observed", "_statistics"):
        one, other = (
            to_numpy(getattr(block.attention, name))
            for block in (layer, single)
        )
        assert np.any(other != 0)
        assert_close(one, other, 1e-5)
    copies = two_replicas.experimental_local_results(
        layer.attention._feature_weights["log_psi"].value
    )
    np.testing.assert_array_equal(*[to_numpy(copy) for copy in copies])


def test_calibration_is_one_pass():
    layer = attention()
    layer(X * 7, training=True)  # forgotten
    layer.calibrate(X)
    assert_close(a_of(layer), expected_a(layer, X), 1e-4)
    # Batches of several sizes: each token counts once.
    layer.calibrate(iter([X[:1], X[1:]]))
    assert_close(a_of(layer), expected_a(layer, X), 1e-4)
    before = a_of(layer)
    layer(X, training=False)
    np.testing.assert_array_equal(a_of(layer), before)


def test_a_model_is_calibrated_as_a_whole():
    inputs = keras.Input((7, 12))
    blocks = [
        PerformerBlock(2, 13, feature_map="favor++") for _ in range(2)
    ]
    model = keras.Model(inputs, blocks[1](blocks[0](inputs)))
    data = [(X[:2], X[:2]), (X[2:], X[2:])]  # with labels, as `fit` takes it
    keras_performer.calibrate(model, data)
    first = blocks[0].attention
    normed = blocks[0].attention_norm(X)
    assert_close(a_of(first), expected_a(first, normed), 1e-4)
    assert np.all(a_of(blocks[1].attention) < 0)


@pytest.mark.tensorflow_only("tf.data")
def test_calibration_takes_a_dataset():
    layer = attention()
    layer.calibrate(tf.data.Dataset.from_tensor_slices((X, X)).batch(2))
    assert_close(a_of(layer), expected_a(layer, X), 1e-4)


def test_wrong_calibration_is_an_error():
    with pytest.raises(ValueError, match="adapts"):
        attention("favor+").calibrate(X)
    with pytest.raises(ValueError, match="argument `data`"):
        attention().calibrate([])


def test_learned_features_follow_the_seed():
    def kernel(seed):
        layer = PerformerAttention(
            2, 4, feature_map="hedgehog", num_features=32, seed=seed
        )
        layer.build(X.shape)
        return to_numpy(layer._feature_weights["kernel"])

    np.testing.assert_array_equal(kernel(7), kernel(7))
    assert_differs(kernel(7), kernel(8))
    assert_differs(kernel(None), kernel(None))
