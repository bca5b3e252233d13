"""SavedModel export, and a reload that can be trained further.

A SavedModel is served by programs that have neither this package nor Keras.
Keras's own export writes the inference function only; the functions here
write the training function beside it, so that dropout is active when the
reloaded layer is fine-tuned.

TensorFlow is imported inside the functions: the package must stay importable
where another backend runs and TensorFlow is not installed.
"""

import json
import os

import keras

_SERVE = "serve"
_CALL_TRAINING = "call_training"
# `assets.extra` is the folder that the SavedModel format keeps for files of
# the producer: TensorFlow neither reads nor removes them.
_MARKER = os.path.join("assets.extra", "keras_performer.json")
_MARKER_FORMAT = 1


def export_saved_model(model, path, input_signature=None):
    """Writes a model as a SavedModel that serves and can be fine-tuned.

    The SavedModel has two endpoints, `serve` (inference, also the default
    signature of TensorFlow Serving) and `call_training` (with dropout and
    updates of moving averages). Every dimension that is `None` in the model's
    inputs stays free, and so does the batch: a model built with
    `keras.Input((None,))` serves any batch size and any length. A process
    without this package runs it by `loaded = tf.saved_model.load(path)` and
    `loaded.serve(x)`; it must keep `loaded`, which holds the variables.

    The optimizer's state is not part of a SavedModel: to resume training,
    save a `.keras` file. A Keras mask on the model's *output* (from
    `mask_zero=True`) is not part of it either: make the mask an input or an
    output of the model where a later layer needs it.

    Args:
        model: A built `keras.Model`: functional, `Sequential` or subclassed.
        path: String or path object. The directory to write; an existing
            SavedModel there is replaced.
        input_signature: Structure of `keras.InputSpec` with the shape and
            dtype of the model's first argument. Required for a subclassed
            model, whose inputs Keras does not record; others use their own
            inputs by default.

    A causal `PerformerLM` has the endpoint `generate(ids, num_tokens,
    temperature, seed)` as well: tokens `(B, L)` of int32 without padding, a
    number of tokens to add, a temperature (float32, 0 for the likeliest) and
    a seed give the new tokens. With learned positions, all of them must fit
    into `sequence_length`.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If `model` is not built, if its inputs are unknown, if
            its outputs lie inside of others, or if `path` is an existing
            file.
        NotImplementedError: If the backend is not TensorFlow.

    Example:

    ```python
    export_saved_model(model, "exported")
    layer = load_saved_model("exported")
    ```
    """
    tf = _tensorflow("export_saved_model")
    path = _standardize_path(path)
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Received an invalid value for argument `model`, expected a "
            f"`keras.Model`. Received: model={model} (of type {type(model)})"
        )
    if not model.built:
        raise ValueError(
            "Received an invalid value for argument `model`, expected a built "
            "model. Call it on data or give it a `keras.Input` first. "
            f"Received: model={model}"
        )
    if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
        raise ValueError(
            "Received an invalid value for argument `path`, expected a "
            f"directory or a new path. Received: path={path}, which is a file"
        )
    _check_outputs(model)
    signature = [_input_signature(model, input_signature)]
    archive = keras.export.ExportArchive()
    archive.add_endpoint(
        _SERVE, lambda inputs: model(inputs, training=False), signature
    )
    archive.add_endpoint(
        _CALL_TRAINING, lambda inputs: model(inputs, training=True), signature
    )
    endpoints = getattr(model, "_serving_endpoints", dict)()
    for name, (function, specs) in endpoints.items():
        archive.add_endpoint(name, function, specs)
    # The TensorFlow variable of a frozen layer still says that it is
    # trainable: only the lists keep what the model says. They hold the very
    # variables that the endpoints use; Keras's wrappers, or
    # `archive.track(model)`, would write every value a second time.
    for name in "variables", "trainable_variables", "non_trainable_variables":
        archive.add_variable_collection(
            name, [variable.value for variable in getattr(model, name)]
        )
    archive.write_out(path, verbose=False)
    marker = os.path.join(path, _MARKER)
    tf.io.gfile.makedirs(os.path.dirname(marker))
    with tf.io.gfile.GFile(marker, "w") as file:
        json.dump({"format": _MARKER_FORMAT}, file)


def load_saved_model(path):
    """Reloads what `export_saved_model` wrote, as a Keras layer.

    The layer predicts what the exported model predicted, for every batch size
    and length that it accepted, and trains inside any Keras model with any
    optimizer: `training=True` runs the exported training function. What was
    trainable in the exported model is trainable in the layer, and nothing
    else is.

    Loading runs the graph that the directory holds: load what you trust.

    Args:
        path: String or path object. The directory of the SavedModel. Keep it:
            a model that holds the layer saves the path, not the graph.

    Returns:
        A built `SavedModelLayer`.

    Raises:
        ValueError: If `path` does not exist, is not a SavedModel, or was not
            written by `export_saved_model`.
        NotImplementedError: If the backend is not TensorFlow.

    Example:

    ```python
    layer = load_saved_model("exported")
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layer])
    model.compile("adam", "mse")
    model.fit(x, y)
    ```
    """
    return SavedModelLayer(path)


@keras.saving.register_keras_serializable(package="keras_performer")
class SavedModelLayer(keras.layers.TFSMLayer):
    """A reloaded SavedModel; `load_saved_model` makes it.

    As every layer around foreign graph code, it is refused by Keras's safe
    mode: a saved model that holds one is loaded by
    `keras.models.load_model(file, safe_mode=False)`.

    Args:
        filepath: String or path object. A directory that
            `export_saved_model` wrote.
        trainable: Boolean. Whether the trainable variables are trained.
        name: String. The name of the layer.
        dtype: The dtype policy of the layer. The reloaded function computes
            in the dtypes that it was exported with, whatever this says.

    Call arguments:
        inputs: Tensor or structure of tensors, as the exported model took.
        training: Boolean. Whether dropout is active.

    Returns:
        What the exported model returned.
    """

    def __init__(self, filepath, trainable=True, name=None, dtype=None):
        tf = _tensorflow("load_saved_model")
        filepath = _standardize_path(filepath)
        _check_export(tf, filepath)
        super().__init__(
            filepath,
            call_endpoint=_SERVE,
            call_training_endpoint=_CALL_TRAINING,
            trainable=trainable,
            name=name,
            dtype=dtype,
        )
        # The exported function fixes the dtype of every input; `call` casts
        # to it. A cast to the layer's own dtype first would lose digits.
        self.autocast = False

    def _add_existing_weight(self, weight):
        # Overridden because an optimizer names its slots after the variables,
        # and refuses names such as "kernel:0"; and because `weight.trainable`
        # is True for a layer that was frozen after it was built.
        trainable = self._reloaded_obj.trainable_variables
        self._track_variable(
            keras.Variable(
                initializer=weight,
                trainable=any(weight is v for v in trainable),
                dtype=weight.dtype,
                shape=weight.shape,
                name=weight.name.removesuffix(":0").replace("/", "_"),
            )
        )

    def call(self, inputs, training=False):
        return super().call(self._match_signature(inputs), training=training)

    def _match_signature(self, inputs):
        """Casts the inputs to the dtypes that the function was traced with."""
        function = self.call_endpoint_fn.concrete_functions[0]
        specs = function.structured_input_signature[0][0]
        flat_inputs = keras.tree.flatten(inputs)
        flat_specs = keras.tree.flatten(specs)
        same = _keys(inputs) == _keys(specs)
        if not same or not all(
            spec.shape.is_compatible_with(x.shape)
            for spec, x in zip(flat_specs, flat_inputs, strict=True)
        ):
            expected = keras.tree.map_structure(lambda s: s.shape, specs)
            received = keras.tree.map_structure(lambda x: x.shape, inputs)
            raise ValueError(
                "Received an invalid value for argument `inputs`, expected "
                f"the shapes that were exported, {expected}. Received: "
                f"inputs of shape {received}"
            )
        flat_inputs = [
            keras.ops.cast(x, spec.dtype.name)
            for spec, x in zip(flat_specs, flat_inputs, strict=True)
        ]
        return keras.tree.pack_sequence_as(specs, flat_inputs)

    def get_config(self):
        config = super().get_config()
        # The endpoints are those of this module, not arguments.
        del config["call_endpoint"], config["call_training_endpoint"]
        return config


def _keys(structure):
    """The path of each leaf: equal for structures that can replace another."""
    return [path for path, _ in keras.tree.flatten_with_path(structure)]


def _tensorflow(function_name):
    if keras.config.backend() != "tensorflow":
        raise NotImplementedError(
            f"`{function_name}` needs the TensorFlow backend, as a SavedModel "
            "is a TensorFlow graph. Set KERAS_BACKEND=tensorflow. Received: "
            f"backend={keras.config.backend()}"
        )
    import tensorflow as tf

    return tf


def _standardize_path(path):
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "Received an invalid value for argument `path`, expected a string "
            f"or a path object. Received: path={path} (of type {type(path)})"
        )
    return os.fspath(path)


def _input_signature(model, input_signature):
    """The structure of input specs, with a free batch dimension."""
    if input_signature is None:
        if not getattr(model, "inputs", None):
            raise ValueError(
                "A subclassed model does not record the shape and dtype of "
                "its input. Pass `input_signature`, for example "
                '`keras.InputSpec(shape=(None, None), dtype="int32")`. '
                f"Received: model={model}, input_signature=None"
            )
        sequential = isinstance(model, keras.Sequential)
        input_signature = model.inputs[0] if sequential else model.input
    return keras.tree.map_structure(
        lambda x: keras.InputSpec(
            shape=(None, *x.shape[1:]),
            dtype=keras.backend.standardize_dtype(x.dtype),
            name=x.name,
        ),
        input_signature,
    )


def _check_outputs(model):
    """Raises if outputs lie inside of others, where they are known."""
    outputs = getattr(model, "output", None)
    values = outputs
    if isinstance(outputs, dict):
        values = list(outputs.values())
    if isinstance(values, (list, tuple)) and any(
        keras.tree.is_nested(value) for value in values
    ):
        raise ValueError(
            "A SavedModel has outputs in one list or one dict. Make a model "
            'of flat outputs, as {"y": output, **state}. Received: '
            f"model.output={outputs}"
        )


def _check_export(tf, path):
    """Raises if `path` was not written by `export_saved_model`."""
    expected = (
        "Received an invalid value for argument `path`, expected a directory "
        f"written by `export_saved_model`. Received: path={path}, which "
    )
    exists = tf.io.gfile.exists
    if not exists(path):
        raise ValueError(expected + "does not exist")
    if not exists(os.path.join(path, "saved_model.pb")):
        raise ValueError(expected + "is not a SavedModel (no saved_model.pb)")
    marker = os.path.join(path, _MARKER)
    if not exists(marker):
        raise ValueError(
            expected + f"is a SavedModel of another origin (no {_MARKER}). "
            "`keras.layers.TFSMLayer` loads those"
        )
    with tf.io.gfile.GFile(marker) as file:
        text = file.read()
    if text != json.dumps({"format": _MARKER_FORMAT}):
        raise ValueError(
            expected + f"has a {_MARKER} that this version cannot read: {text}"
        )
