"""Callbacks for `model.fit`."""

import keras
import numpy as np
from keras import ops

from keras_performer import arguments
from keras_performer import feature_maps
from keras_performer import ops as attention_ops
from keras_performer.layers import PerformerAttention


class ApproximationMonitor(keras.callbacks.Callback):
    """Shows whether random features still estimate attention well.

    Training sharpens attention, and sharp attention is what random features
    estimate worst. After each epoch the model is run on a probe, in inference
    mode, and for every `PerformerAttention` that is not exact these scalars
    are logged under `<path of the layer>/`:

    - `phi`: mean of `|x + y|^2` over queries x and keys y (both times
      `key_dim ** -0.25`) of all valid tokens. The relative standard deviation
      of one estimate is about `sqrt((exp(phi) - 1) / num_features)`: 10 % at
      256 features and a phi of 1.3.
    - `temperature`: 1 over the standard deviation of the scores `x.y` in a
      row; large where attention is flat, small where it is sharp.
    - `relative_error`: of the attention's output against exact softmax
      attention of the same queries, keys and values, in the Frobenius norm.
      Only for maps that stand for the softmax kernel, "hedgehog" included.
    - `at_floor`: share of rows with a key whose sum of weights is below its
      floor, so that their output is 0. It should be 0.

    All are about softmax attention of the queries and keys as they are; a map
    with a trained temperature estimates another one beyond its window.

    They are added to the epoch's logs too, and so to the history.

    Args:
        probe: Input of the model: a few sequences, the same at each epoch.
            Exact attention on them costs O(L^2) time and memory.
        log_dir: Folder for TensorBoard, or `None` to add to the logs alone.
            Needs TensorFlow.
        every: Epochs from one measurement to the next, an integer.

    Raises:
        ValueError: If `every` is not a positive integer, or (when training
            begins) no layer of the model is approximate.

    Example:

    >>> monitor = keras_performer.callbacks.ApproximationMonitor(
    ...     x[:4], log_dir="logs/approximation")
    >>> model.fit(x, y, callbacks=[monitor])

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), Lemma 2
      (the variance of positive features)
    """

    def __init__(self, probe, log_dir=None, every=1):
        super().__init__()
        arguments.check_integer("every", every)
        self.probe = probe
        self.log_dir = log_dir
        self.every = every
        self._writer = None

    def on_train_begin(self, logs=None):
        if not _approximate_layers(self.model):
            raise ValueError(
                f"{self.model.name} has no PerformerAttention with an "
                "approximate feature map to monitor."
            )
        if self.log_dir is not None:
            import tensorflow as tf

            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every:
            return
        values = measure_approximation(self.model, self.probe)
        if logs is not None:
            logs.update(values)
        if self._writer is not None:
            import tensorflow as tf

            with self._writer.as_default():
                for name, value in values.items():
                    tf.summary.scalar(name, value, step=epoch)
            self._writer.flush()

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def measure_approximation(model, probe):
    """What `ApproximationMonitor` logs, for a model and a probe.

    Args:
        model: A built model or layer.
        probe: Its input.

    Returns:
        Dict of names to floats.
    """
    layers = _approximate_layers(model)
    calls = [[] for _ in layers]
    # What is recomputed is traced, and would keep no arrays.
    every = list(model._flatten_layers())
    modes = [getattr(layer, "_remat_mode", None) for layer in every]
    for layer, its_calls in zip(layers, calls):
        layer._probe = its_calls.append
    for layer in every:
        layer._remat_mode = None
    try:
        model(probe, training=False)
    finally:
        for layer in layers:
            layer._probe = None
        for layer, mode in zip(every, modes):
            layer._remat_mode = mode
    values = {}
    for layer, its_calls in zip(layers, calls):
        # A layer that is called more than once counts as one.
        parts = [_measure(layer, *call) for call in its_calls]
        for name in parts[0] if parts else ():
            mean = np.mean([part[name] for part in parts])
            values[f"{layer.path}/{name}"] = float(mean)
    return values


def _approximate_layers(model):
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, PerformerAttention)
        and not isinstance(layer.feature_map, feature_maps.Exact)
    ]


def _measure(layer, query, key, value, query_mask, key_mask, causal):
    output = layer._attend(query, key, value, key_mask, causal)
    totals = layer._attend(
        query, key, ops.ones_like(value[..., :1]), key_mask, causal
    )
    x, y = (_array(layer._scaled(z)) for z in (query, key))
    rows = np.ones(x.shape[:2], "bool")  # [B, L]
    columns = np.ones(y.shape[:2], "bool")  # [B, S]
    if query_mask is not None:
        rows = _array(query_mask) > 0
    if key_mask is not None:
        columns = _array(key_mask) > 0
    seen = np.logical_and(rows[:, None, :, None], columns[:, None, None, :])
    if causal:
        seen = np.logical_and(seen, np.tri(x.shape[1], dtype="bool"))
    some = np.any(seen, axis=-1)[:, 0, :]  # [B, L]
    x_valid, y_valid = x[rows], y[columns]  # [n, H, D]
    phi = (
        np.mean(np.sum(np.square(x_valid), axis=-1), axis=0)
        + np.mean(np.sum(np.square(y_valid), axis=-1), axis=0)
        + 2 * np.sum(np.mean(x_valid, axis=0) * np.mean(y_valid, axis=0), -1)
    )  # [H]
    scores = np.einsum("bihd,bjhd->bhij", x, y)
    count = np.maximum(np.sum(seen, axis=-1, keepdims=True), 1)
    mean = np.sum(scores * seen, axis=-1, keepdims=True) / count
    variance = np.sum(np.square(scores - mean) * seen, -1) / count[..., 0]
    several = np.broadcast_to(count[..., 0] > 1, variance.shape)
    # Of rows that see one key each there is no spread: as flat as can be.
    spread = np.sqrt(np.sum(variance * several) / max(np.sum(several), 1))
    values = {
        "phi": np.mean(phi),
        "temperature": 1.0 / max(spread, 1e-12),
        "at_floor": np.mean(np.abs(_array(totals)[some]) < 0.5),
    }
    if layer.feature_map.estimates_softmax or layer.feature_map.allows_window:
        exact = _array(
            attention_ops.exact_attention(
                query, key, value, key_mask, causal=causal
            )
        )[some]
        error = np.linalg.norm(_array(output)[some] - exact)
        values["relative_error"] = error / max(np.linalg.norm(exact), 1e-30)
    return values


def _array(x):
    return ops.convert_to_numpy(ops.cast(x, "float32")).astype("float64")
