"""The monitor of the approximation."""

import keras
import numpy as np
import pytest

from keras_performer import PerformerAttention
from keras_performer import PerformerBlock
from keras_performer import callbacks
from keras_performer.callbacks import measure_approximation
from tests.testing import normal
from tests.testing import to_numpy


def model_of(*layers):
    inputs = outputs = keras.Input((None, 8))
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


def test_each_epoch_logs_every_layer():
    model = model_of(
        PerformerBlock(2, 5, num_features=16, name="one"),
        PerformerAttention(2, 4, feature_map="exact", name="two"),
        PerformerAttention(2, 4, feature_map="relu", name="three"),
    )
    x = normal(6, 13, 8)
    monitor = callbacks.ApproximationMonitor(x[:2], every=2)
    history = model.fit(
        x, x, epochs=4, verbose=0, callbacks=[monitor]
    ).history
    names = {name for name in history if "/" in name}
    assert names == {
        *(f"one/attention/{n}" for n in ("phi", "temperature", "at_floor")),
        "one/attention/relative_error",
        *(f"three/{n}" for n in ("phi", "temperature", "at_floor")),
    }
    for name in names:
        assert len(history[name]) == 2
        assert np.all(np.isfinite(history[name]))


@pytest.mark.tensorflow_only("the summary writer is TensorFlow's")
def test_tensorboard_gets_the_scalars(tmp_path):
    import tensorflow as tf
    from tensorboard.backend.event_processing import event_accumulator

    model = model_of(PerformerBlock(2, 5, num_features=16, name="one"))
    x = normal(6, 13, 8)
    monitor = callbacks.ApproximationMonitor(x[:2], log_dir=tmp_path)
    history = model.fit(
        x, x, epochs=2, verbose=0, callbacks=[monitor]
    ).history
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (name,) = [n for n in events.Tags()["tensors"] if n.endswith("phi")]
    assert name == "one/attention/phi"
    assert [event.step for event in events.Tensors(name)] == [0, 1]
    values = [
        float(tf.make_ndarray(event.tensor_proto))
        for event in events.Tensors(name)
    ]
    np.testing.assert_allclose(values, history[name], rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_measured(causal):
    layer = PerformerAttention(
        1, 4, num_features=8, causal=causal, local_window=0, name="attention"
    )
    x = normal(2, 11, 8)
    mask = np.ones((2, 11), "bool")
    mask[1, 6:] = False
    inputs = keras.Input((11, 8))
    keep = keras.Input((11,), dtype="bool")
    model = keras.Model([inputs, keep], layer(inputs, mask=keep))
    values = measure_approximation(model, [x, mask])
    size = 4**-0.25
    q, k = (
        to_numpy(part(x))[:, :, 0] * size for part in (layer.query, layer.key)
    )
    pairs = q[mask][:, None] + k[mask][None, :]
    phi = np.mean(np.sum(np.square(pairs), axis=-1))
    assert values["attention/phi"] == pytest.approx(phi, rel=1e-4)
    spread = []
    for row in range(2):
        for i in np.flatnonzero(mask[row]):
            last = i + 1 if causal else 11
            keys = k[row, :last][mask[row, :last]]
            if len(keys) > 1:
                spread.append(np.var(keys @ q[row, i]))
    assert values["attention/temperature"] == pytest.approx(
        1 / np.sqrt(np.mean(spread)), rel=1e-4
    )
    assert values["attention/at_floor"] == 0.0
    exact = PerformerAttention(1, 4, feature_map="exact", causal=causal)
    exact.build(x.shape)
    # Without the output layer: its kernel the identity, here of both.
    eye = np.eye(4, 8).reshape(1, 4, 8).astype("float32")
    layer.attention_output.kernel.assign(eye)
    weights = layer.get_weights()
    exact.set_weights(weights[1:])
    one = to_numpy(layer(x, mask=mask))[mask]
    other = to_numpy(exact(x, mask=mask))[mask]
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    assert error > 1e-3
    assert values["attention/relative_error"] == pytest.approx(error, rel=1e-3)
    # Up to two blocks of a window, attention is exact.
    near = PerformerAttention(
        1, 4, num_features=8, causal=True, local_window=8, name="near"
    )
    near.build(x.shape)
    assert measure_approximation(near, x)["near/relative_error"] < 1e-5


def test_rows_at_the_floor_are_counted():
    # Plain features that vanish: a kernel of 0 everywhere.
    from keras_performer.feature_maps import GeneralizedKernel

    layer = PerformerAttention(
        2, 4, feature_map=GeneralizedKernel("relu", 0.0), name="attention"
    )
    layer.build((1, 5, 8))
    layer.query.kernel.assign(np.zeros((8, 2, 4), "float32"))
    values = measure_approximation(layer, normal(1, 5, 8))
    assert values["attention/at_floor"] == 1.0


def test_what_is_recomputed_is_measured_too():
    x = normal(2, 5, 8)
    plain = model_of(PerformerBlock(2, 5, num_features=16, name="one"))
    with keras.RematScope(mode="full"):
        layer = PerformerBlock(2, 5, num_features=16, name="one")
    recomputed = model_of(layer)
    recomputed.set_weights(plain.get_weights())
    values = measure_approximation(recomputed, x)
    expected = measure_approximation(plain, x)
    assert values.keys() == expected.keys()
    np.testing.assert_allclose(
        list(values.values()), list(expected.values()), rtol=1e-5
    )
    # It is recomputed still.
    assert layer._remat_mode.mode == "full"


def test_one_token_has_no_spread():
    layer = PerformerAttention(2, 4, num_features=16, name="attention")
    values = measure_approximation(model_of(layer), normal(2, 1, 8))
    assert np.all(np.isfinite(list(values.values())))
    assert values["attention/temperature"] >= 1e9


def test_wrong_use_is_an_error():
    with pytest.raises(ValueError, match="argument `every`"):
        callbacks.ApproximationMonitor(None, every=0)
    model = model_of(PerformerAttention(2, 4, feature_map="exact"))
    x = normal(2, 5, 8)
    with pytest.raises(ValueError, match="no PerformerAttention"):
        model.fit(
            x,
            x,
            verbose=0,
            callbacks=[callbacks.ApproximationMonitor(x)],
        )
