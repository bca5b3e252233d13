"""SavedModel export and reload."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_performer
from keras_performer import saving

if keras.config.backend() == "tensorflow":
    import tensorflow as tf

to_numpy = keras.ops.convert_to_numpy

tensorflow_only = pytest.mark.tensorflow_only(
    "a SavedModel is a TensorFlow graph"
)

# Both sides run the same float32 graph; only the order of the sums inside
# the fused kernels may differ, a few units of 6e-8 on values of order 1.
TOLERANCE = 1e-5

VOCABULARY = 11


def token_model(dropout=0.5):
    """Ids of any length to logits, with every kind of variable there is."""
    keras.utils.set_random_seed(1)
    frozen = keras.layers.Dense(8, name="frozen")
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 8, mask_zero=True),
            frozen,
            keras.layers.Dropout(dropout),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(VOCABULARY, name="head"),
        ]
    )
    # Frozen after it was built, as users do before fine-tuning: TensorFlow's
    # own flag of these variables still says trainable.
    frozen.trainable = False
    return model


def ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, VOCABULARY, shape, "int32")


@pytest.fixture
def exported(tmp_path):
    model = token_model()
    path = tmp_path / "exported"
    saving.export_saved_model(model, path)
    return model, path


@tensorflow_only
@pytest.mark.parametrize("shape", [(1, 7), (5, 33), (3, 1)])
def test_reload_predicts_the_same(exported, shape):
    model, path = exported
    layer = saving.load_saved_model(path)
    x = ids(*shape)
    expected = model(x, training=False)
    np.testing.assert_allclose(layer(x), expected, atol=TOLERANCE)
    # Ids of another integer type are cast, as a functional model does.
    np.testing.assert_allclose(
        layer(x.astype("int64")), expected, atol=TOLERANCE
    )


@tensorflow_only
def test_serves_without_the_package(exported, tmp_path):
    model, path = exported
    shapes = [(1, 7), (5, 33), (3, 1)]
    inputs = {f"{b}x{t}": ids(b, t) for b, t in shapes}
    np.savez(tmp_path / "inputs.npz", **inputs)
    program = f"""
import sys
import numpy as np
import tensorflow as tf

loaded = tf.saved_model.load({str(path)!r})
inputs = np.load({str(tmp_path / "inputs.npz")!r})
outputs = {{k: loaded.serve(inputs[k]).numpy() for k in inputs}}
np.savez({str(tmp_path / "outputs.npz")!r}, **outputs)
assert "keras_performer" not in sys.modules
"""
    # -I keeps the checkout off the path.
    subprocess.run([sys.executable, "-I", "-c", program], check=True)
    outputs = np.load(tmp_path / "outputs.npz")
    for key, x in inputs.items():
        np.testing.assert_allclose(
            outputs[key], model(x, training=False), atol=TOLERANCE
        )


@tensorflow_only
def test_static_length_is_kept(tmp_path):
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.Dense(2)])
    saving.export_saved_model(model, tmp_path / "exported")
    layer = saving.load_saved_model(tmp_path / "exported")
    assert layer(np.zeros((4, 6, 3), "float32")).shape == (4, 6, 2)
    with pytest.raises(ValueError, match=r"`inputs`.*\(None, 6, 3\).*5"):
        layer(np.zeros((4, 5, 3), "float32"))


@tensorflow_only
def test_variables_are_kept_apart(exported):
    model, path = exported
    layer = saving.load_saved_model(path)
    names = [v.path.replace("/", "_") for v in model.trainable_variables]
    assert [v.name for v in layer.trainable_variables] == names
    for ours, theirs in zip(
        layer.trainable_variables, model.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert sorted(v.name for v in layer.non_trainable_variables) == sorted(
        v.path.replace("/", "_") for v in model.non_trainable_variables
    )
    layer.trainable = False
    assert not layer.trainable_variables


@tensorflow_only
def test_dropout_is_active_in_training_only(exported):
    _, path = exported
    layer = saving.load_saved_model(path)
    x = ids(4, 9)
    first, second = (to_numpy(layer(x, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 0.1
    first, second = (to_numpy(layer(x, training=False)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@tensorflow_only
def test_fine_tunes_with_adam_and_exports_again(exported, tmp_path):
    _, path = exported
    layer = saving.load_saved_model(path)
    before = {v.name: to_numpy(v) for v in layer.variables}
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layer])
    model.compile(
        keras.optimizers.Adam(0.02),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x = ids(32, 8)
    losses = model.fit(x, x, epochs=30, verbose=0).history["loss"]
    # The identity on tokens is learnable through one embedding, with half of
    # its units dropped: a model that does not learn stays at log(10) = 2.3.
    assert losses[-1] < 0.5 * losses[0]
    for v in layer.variables:
        moved = np.abs(to_numpy(v) - before[v.name]).max() > 0
        assert moved != ("frozen" in v.name), v.name

    saving.export_saved_model(model, tmp_path / "again")
    again = saving.load_saved_model(tmp_path / "again")
    np.testing.assert_allclose(
        again(x), model(x, training=False), atol=TOLERANCE
    )
    assert len(again.trainable_variables) == len(layer.trainable_variables)


@tensorflow_only
def test_several_inputs_with_a_mask(tmp_path):
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    mask = keras.Input((None,), dtype="bool", name="mask")
    x = keras.layers.Embedding(VOCABULARY, 8)(tokens)
    pooled = keras.layers.GlobalAveragePooling1D()(x, mask=mask)
    outputs = keras.layers.Dense(3)(pooled)
    x, keep = ids(4, 6), np.arange(6) < np.array([[6], [3], [1], [5]])
    for inputs, data in (
        ([tokens, mask], [x, keep]),
        ({"tokens": tokens, "mask": mask}, {"tokens": x, "mask": keep}),
    ):
        model = keras.Model(inputs, outputs)
        saving.export_saved_model(model, tmp_path / "exported")
        layer = saving.load_saved_model(tmp_path / "exported")
        np.testing.assert_allclose(layer(data), model(data), atol=TOLERANCE)
        with pytest.raises(ValueError, match="argument `inputs`"):
            layer(x)


@tensorflow_only
def test_float64_keeps_its_digits(tmp_path):
    inputs = keras.Input((3,), dtype="float64")
    outputs = keras.layers.Rescaling(1.0, dtype="float64")(inputs)
    saving.export_saved_model(keras.Model(inputs, outputs), tmp_path / "e")
    x = np.array([[1 + 1e-12, 1 - 1e-12, 1e-300]])
    layer = saving.load_saved_model(tmp_path / "e")
    np.testing.assert_array_equal(layer(x), x)


@keras.saving.register_keras_serializable(package="test_saving")
class SubclassedModel(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(VOCABULARY, 4)

    def call(self, inputs):
        return self.embedding(inputs)


@tensorflow_only
def test_subclassed_model_needs_a_signature(tmp_path):
    model = SubclassedModel()
    x = ids(2, 5)
    expected = model(x)
    with pytest.raises(ValueError, match="Pass `input_signature`"):
        saving.export_saved_model(model, tmp_path / "exported")
    saving.export_saved_model(
        model,
        tmp_path / "exported",
        input_signature=keras.InputSpec(shape=(None, None), dtype="int32"),
    )
    layer = saving.load_saved_model(tmp_path / "exported")
    np.testing.assert_array_equal(layer(x), expected)
    assert layer(ids(3, 9)).shape == (3, 9, 4)


@tensorflow_only
def test_config_round_trip(exported, tmp_path):
    _, path = exported
    layer = saving.load_saved_model(path)
    config = json.loads(json.dumps(layer.get_config()))
    assert config["filepath"] == str(path)
    copy = saving.SavedModelLayer.from_config(config, safe_mode=False)
    x = ids(2, 5)
    np.testing.assert_array_equal(copy(x), layer(x))
    assert copy.get_config() == config

    # A .keras file names the directory and holds the fine-tuned weights.
    model = keras.Sequential([keras.Input((None,), dtype="int32"), layer])
    layer.trainable_variables[0].assign_add(
        np.ones_like(layer.trainable_variables[0])
    )
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="safe_mode=False"):
        keras.models.load_model(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", safe_mode=False
    )
    np.testing.assert_allclose(loaded(x), model(x), atol=TOLERANCE)


@tensorflow_only
def test_export_replaces_an_earlier_one(exported):
    model, path = exported
    head = model.get_layer("head")
    head.kernel.assign(head.kernel * 2.0)
    saving.export_saved_model(model, path)
    x = ids(2, 5)
    np.testing.assert_allclose(
        saving.load_saved_model(path)(x), model(x), atol=TOLERANCE
    )


@tensorflow_only
def test_export_errors(tmp_path):
    path = tmp_path / "exported"
    with pytest.raises(TypeError, match=r"`model`, expected a `keras.Model`"):
        saving.export_saved_model(keras.layers.Dense(2), path)
    with pytest.raises(ValueError, match="expected a built model"):
        saving.export_saved_model(
            keras.Sequential([keras.layers.Dense(2)]), path
        )
    with pytest.raises(TypeError, match="argument `path`"):
        saving.export_saved_model(token_model(), 3)
    path.write_text("a file")
    with pytest.raises(ValueError, match="is a file"):
        saving.export_saved_model(token_model(), path)
    assert path.read_text() == "a file"


@tensorflow_only
def test_load_errors_name_the_path(exported, tmp_path):
    model, path = exported
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    foreign = tmp_path / "foreign"
    model.export(foreign, verbose=False)
    newer = path / "assets.extra" / "keras_performer.json"
    newer.write_text('{"format": 99}')
    for wrong, reason in (
        (missing, "does not exist"),
        (empty, "is not a SavedModel"),
        (foreign, "of another origin"),
        (path, "cannot read"),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            saving.load_saved_model(wrong)
        assert str(wrong) in str(caught.value)
    with pytest.raises(TypeError, match="argument `path`"):
        saving.load_saved_model(None)


@pytest.mark.skipif(
    keras.config.backend() == "tensorflow", reason="for the other backends"
)
def test_other_backends_are_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(NotImplementedError, match="KERAS_BACKEND=tensorflow"):
        saving.export_saved_model(model, tmp_path / "exported")
    with pytest.raises(NotImplementedError, match="KERAS_BACKEND=tensorflow"):
        saving.load_saved_model(tmp_path)
    assert not list(pathlib.Path(tmp_path).iterdir())


def normal(*shape):
    return np.random.default_rng(5).normal(size=shape).astype("float32")


# A window of 4 and chunks of 8 make the longest input, 33 tokens, use the
# exact blocks, the carried state and several chunks.
BLOCKS = {
    "bidirectional": {},
    "causal": {"causal": True, "local_window": 0, "chunk_size": 8},
    "windowed": {"causal": True, "local_window": 4},
}


@pytest.fixture(scope="module")
def exported_blocks(tmp_path_factory):
    """Models of one block with dropout, each with its export."""
    if keras.config.backend() != "tensorflow":
        # A fixture of a module is made before the test's own mark is read.
        pytest.skip("a SavedModel is a TensorFlow graph")
    blocks = {}
    for kind, kwargs in BLOCKS.items():
        keras.utils.set_random_seed(3)
        block = keras_performer.PerformerBlock(
            num_heads=2,
            intermediate_dim=32,
            num_features=32,
            dropout=0.3,
            **kwargs,
        )
        model = keras.Sequential([keras.Input((None, 16)), block])
        path = tmp_path_factory.mktemp(kind)
        saving.export_saved_model(model, path)
        blocks[kind] = model, path
    return blocks


@pytest.mark.one_in(2)
@tensorflow_only
@pytest.mark.parametrize("kind", BLOCKS)
def test_o49_block_exports_for_any_batch_and_length(
    kind, exported_blocks, tmp_path
):
    model, path = exported_blocks[kind]
    model.export(tmp_path, verbose=False)
    # The functions hold their variables weakly: the loaded objects must live.
    loaded = [tf.saved_model.load(str(p)) for p in (path, tmp_path)]
    reloads = [
        *(one.serve for one in loaded),
        saving.load_saved_model(path),
        keras.layers.TFSMLayer(tmp_path),
    ]
    for shape in ((1, 7), (5, 33), (3, 1)):
        x = normal(*shape, 16)
        expected = model.predict(x, verbose=0)
        for reloaded in reloads:
            first = reloaded(x)
            np.testing.assert_allclose(first, expected, atol=TOLERANCE)
            np.testing.assert_array_equal(reloaded(x), first)


@pytest.mark.one_in(3)
@tensorflow_only
@pytest.mark.parametrize("kind", BLOCKS)
def test_o50_gradients_of_the_reloaded_block(kind, exported_blocks):
    model, path = exported_blocks[kind]
    layer = saving.load_saved_model(path)
    names = [v.path.replace("/", "_") for v in model.trainable_variables]
    assert sorted(v.name for v in layer.trainable_variables) == sorted(names)
    x = tf.constant(normal(2, 33, 16))
    target = normal(2, 33, 16)

    def gradients(function, variables):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((function(x) - target) ** 2)
        return tape.gradient(loss, [x, *(v.value for v in variables)])

    ours = {v.name: v for v in layer.trainable_variables}
    expected = gradients(model, model.trainable_variables)
    for name, got, want in zip(
        ["input", *names],
        gradients(layer, [ours[name] for name in names]),
        expected,
        strict=True,
    ):
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(
            got, want, atol=1e-4 * np.abs(want).max(), err_msg=name
        )


@tensorflow_only
def test_reloaded_block_fine_tunes(exported_blocks):
    model, path = exported_blocks["windowed"]
    layer = saving.load_saved_model(path)
    projection = to_numpy(model.layers[0].attention.projection)
    (ours,) = [v for v in layer.non_trainable_variables if "proj" in v.name]
    tuned = keras.Sequential([keras.Input((None, 16)), layer])
    tuned.compile(keras.optimizers.Adam(0.01), "mse")
    x = normal(16, 12, 16)
    losses = tuned.fit(x, -x, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_array_equal(ours, projection)
    first, second = (to_numpy(layer(x, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 0.1


@tensorflow_only
def test_redraw_and_statistics_go_on_in_a_reloaded_block(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 9, 6)).astype("float32")
    block = keras_performer.PerformerBlock(
        2,
        13,
        causal=True,
        local_window=2,
        num_features=6,
        feature_map="favor++",
        redraw_interval=2,
    )
    model = keras.Sequential([keras.Input((None, 6)), block])
    block(x, training=True)
    saving.export_saved_model(model, tmp_path / "exported")
    layer = saving.load_saved_model(tmp_path / "exported")

    def state():
        return {
            weight.path.rpartition("attention_")[-1]: to_numpy(weight)
            for weight in layer.non_trainable_variables
        }

    names = {"projection", "a", "statistics", "observed", "redraw_state"}
    first = state()
    assert names == set(first)
    np.testing.assert_allclose(
        to_numpy(layer(x)), to_numpy(block(x)), atol=TOLERANCE
    )
    # Other inputs: the same would leave the same statistics of a step.
    layer(2 * x, training=True)  # the second step
    np.testing.assert_array_equal(state()["projection"], first["projection"])
    layer(2 * x, training=True)  # the third draws anew
    last = state()
    for name in names:
        assert np.any(last[name] != first[name]), name
    # As the block itself would have.
    block(x, training=True)
    block(x, training=True)
    np.testing.assert_array_equal(
        last["projection"], to_numpy(block.attention.projection)
    )


def test_outputs_inside_of_others_are_refused(tmp_path):
    x = keras.Input((3,))
    model = keras.Model(x, [x, {"y": 2 * x}])
    with pytest.raises(ValueError, match="flat outputs"):
        saving.export_saved_model(model, tmp_path / "exported")
