"""Training of the pipelines: killed and started again, and on replicas."""

import csv
import dataclasses
import importlib
import shutil
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("tensorflow_text", reason="the examples tokenise by it")

from examples import backup
from examples import common
from examples.pg19 import config as configs
from examples.pg19 import data
from examples.pg19 import train

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

CONFIG = configs.Config(
    sequence_length=16,
    batch_size=4,
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=16,
    num_features=4,
    local_window=4,
    warmup_steps=2,
    learning_rate=0.01,
    steps=6,
    validation_every=2,
    # All that has a state of its own.
    feature_map="favor++",
    redraw_interval=4,
    dropout=0.2,
)


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    for split, word in (
        ("train", "sense and sensibility.\n"),
        ("validation", "sense and tenseness.\n"),
    ):
        (folder / split).mkdir()
        (folder / split / "1.txt").write_text(word * 30)
    return str(folder)


@pytest.fixture(scope="module")
def whole(books, tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train.train(CONFIG, books, str(folder), verbose=0)
    return folder


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Without what costs time after each epoch, and has tests elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_show_text", lambda *arguments: None)
        patch.setattr(common, "_probe", lambda *arguments: None)
        yield


@pytest.fixture(autouse=True)
def replicas(two_replicas, monkeypatch):
    """The strategy that all tests of a process share, see there."""
    strategy = common._strategy

    def shared(name):
        return two_replicas if name == "mirrored" else strategy(name)

    monkeypatch.setattr(common, "_strategy", shared)


def weights(folder):
    """Weights of `last.keras`, and the curve without its times."""
    model = keras.models.load_model(folder / "last.keras")
    with open(folder / "curve.csv") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert float(row.pop("tokens_per_second")) > 0
    return [variable.numpy() for variable in model.variables], rows


def assert_same(found, expected):
    # One machine, one program: not a bit may differ.
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[1] == expected[1]


class Killed(BaseException):
    """Nothing in the training catches it."""


def killing(owner, name, count):
    """A method that ends the training at its call of that number."""
    method = getattr(owner, name)
    calls = []

    def killed(self, *arguments, **kwargs):
        calls.append(arguments)
        if len(calls) == count:
            raise Killed
        return method(self, *arguments, **kwargs)

    return killed


@pytest.mark.parametrize(
    "owner, name, count, done",
    [
        pytest.param(
            common.StopWhenNotFinite,
            "on_train_batch_end",
            1,
            None,
            id="first-step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            common.StopWhenNotFinite,
            "on_train_batch_end",
            4,
            2,
            id="in-an-epoch",
            marks=pytest.mark.slow,
        ),
        # After the checkpoints of the second epoch.
        pytest.param(
            backup.Backup, "on_epoch_end", 2, 2, id="before-a-backup"
        ),
        pytest.param(
            common.Throughput,
            "on_epoch_begin",
            3,
            4,
            id="after-a-backup",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_killed_run_ends_as_an_unbroken_one(
    owner, name, count, done, books, whole, tmp_path, monkeypatch, capsys
):
    broken = tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killing(owner, name, count))
        with pytest.raises(Killed):
            train.train(CONFIG, books, str(broken), verbose=0)
    capsys.readouterr()
    model, _ = train.train(CONFIG, books, str(broken), verbose=0)
    said = f"continuing after step {done}\n" in capsys.readouterr().out
    assert said == (done is not None)
    assert_same(weights(broken), weights(whole))
    best = keras.models.load_model(whole / "best.keras")
    for one, other in zip(model.weights, best.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    # All is done, but what comes after training may still be cut off.
    train.train(CONFIG, books, str(broken), verbose=0)
    assert "continuing after step 6\n" in capsys.readouterr().out
    assert_same(weights(broken), weights(whole))
    common.finish(str(broken))
    assert not (broken / common.BACKUP).exists()


def test_another_unfinished_run_is_refused(books, whole, tmp_path):
    shutil.copy(whole / common.BACKUP, tmp_path)
    with pytest.raises(common.UserError, match="another data_dir. Give"):
        train.train(CONFIG, None, str(tmp_path), verbose=0)
    other = dataclasses.replace(CONFIG, learning_rate=0.5, num_layers=2)
    with pytest.raises(
        common.UserError, match="another learning_rate, num_layers"
    ):
        train.train(other, books, str(tmp_path), verbose=0)
    (tmp_path / common.BACKUP).write_bytes(b"PK no archive")
    with pytest.raises(common.UserError, match="backup.npz cannot be read"):
        train.train(CONFIG, books, str(tmp_path), verbose=0)


def test_a_finished_run_is_not_lost(books, whole, tmp_path, monkeypatch):
    for name in ("config.json", "best.keras", "last.keras"):
        shutil.copy(whole / name, tmp_path)
    other = dataclasses.replace(CONFIG, learning_rate=0.5)
    with pytest.raises(
        common.UserError, match="models of a run with another learning_rate"
    ):
        train.train(other, books, str(tmp_path), verbose=0)
    with pytest.raises(common.UserError, match="another data_dir. Give"):
        train.train(CONFIG, None, str(tmp_path), verbose=0)
    with monkeypatch.context() as patch:
        patch.setattr(data, "load", killing(data, "load", 1))
        with pytest.raises(Killed):
            train.train(CONFIG, books, str(tmp_path), verbose=0)
    assert (tmp_path / "best.keras").exists()
    # The same run begins anew, and never passes an old model for its own.
    with monkeypatch.context() as patch:
        first = killing(common.StopWhenNotFinite, "on_train_batch_end", 1)
        patch.setattr(common.StopWhenNotFinite, "on_train_batch_end", first)
        with pytest.raises(Killed):
            train.train(CONFIG, books, str(tmp_path), verbose=0)
    assert not (tmp_path / "best.keras").exists()
    assert not (tmp_path / "last.keras").exists()


def test_a_backup_is_not_unpickled(tmp_path):
    path = tmp_path / "backup.npz"
    np.savez(path, meta=np.array([{"epochs": 1}], dtype=object))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with pytest.raises(common.UserError, match="cannot be read"):
        backup.Backup(str(path), {}).restore(model)


def test_mixed_precision_goes_on_too(tmp_path):
    # Under mixed_float16 the optimizer is wrapped, and so are its variables.
    def build():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(1, dtype="mixed_float16", name="dense")
        model = keras.Sequential([keras.Input((2,)), dense], name="m")
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse"
        )
        return model

    x = np.ones((4, 2), "float32")
    model = build()
    keep = backup.Backup(str(tmp_path / "backup.npz"), {})
    model.fit(x, x[:, :1], epochs=2, callbacks=[keep], verbose=0)
    again = build()
    assert keep.restore(again) == 2
    for one, other in zip(
        backup._variables(model).items(), backup._variables(again).items()
    ):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    assert any("momentum" in name for name in backup._variables(model))
    # The optimizer's own count, and that of the one inside.
    assert sum("iteration" in name for name in backup._variables(model)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 2.0, 4.0])
def test_a_process_that_was_killed_goes_on(books, tmp_path, seconds):
    """The command itself, killed so long after its first backup."""
    command = [sys.executable, "-m", "examples.pg19.train"]
    for field in dataclasses.fields(CONFIG):
        value = getattr(CONFIG, field.name)
        command.append(f"--{field.name}={value}")
    command += [f"--data_dir={books}", "--sample_tokens=3"]
    command += ["--steps=40"]
    folders = [tmp_path / "whole", tmp_path / "broken"]
    commands = [[*command, f"--output_dir={folder}"] for folder in folders]
    subprocess.run(commands[0], check=True, capture_output=True)
    process = subprocess.Popen(
        commands[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (folders[1] / common.BACKUP).exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    subprocess.run(commands[1], check=True, capture_output=True)
    assert_same(*(weights(folder) for folder in reversed(folders)))


def train_on(distribution, folder, books, **changes):
    config = dataclasses.replace(
        CONFIG, distribution=distribution, batch_size=8, **changes
    )
    model, _ = train.train(config, books, str(folder), verbose=0)
    with open(folder / "curve.csv") as file:
        names = file.readline().split(",")
        rows = [line.split(",") for line in file]
    values = [dict(zip(names, row)) for row in rows]
    keys = ("loss", "bits_per_byte", "val_loss", "val_bits_per_byte")
    curve = [[float(row[key]) for key in keys] for row in values]
    return model, np.array(curve)


@pytest.mark.slow
def test_replicas_train_as_one_device(books, tmp_path):
    one, expected = train_on("none", tmp_path / "a", books)
    many, found = train_on("mirrored", tmp_path / "b", books)
    # Sums over replicas are added in another order: 6 steps of Adam carry
    # float32 roundings on.
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for weight, other in zip(one.weights, many.weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-3, atol=1e-4)


FOUR = """
import sys
import pathlib
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4)
from examples import common
from tests.examples import test_training as tests
folder, books = pathlib.Path(sys.argv[1]), sys.argv[2]
config = tests.dataclasses.replace(
    tests.CONFIG, distribution="mirrored", batch_size=8)
assert common.make_strategy(config).num_replicas_in_sync == 4
tests.train._show_text = common._probe = lambda *arguments: None
_, expected = tests.train_on("none", folder / "a", books)
_, found = tests.train_on("mirrored", folder / "b", books)
tests.np.testing.assert_allclose(found, expected, rtol=1e-4)
"""


@pytest.mark.slow
def test_four_logical_devices_train_as_one(books, tmp_path):
    # In a process of its own, where no other strategy is.
    command = [sys.executable, "-c", FOUR, str(tmp_path), books]
    subprocess.run(command, check=True)


def test_the_loss_is_a_weighted_mean_of_the_whole_batch():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 5, (8, 3))
    logits = rng.normal(size=(8, 3, 5)).astype("float32")
    # The replicas' weights differ; that of the last is 0.
    weight = rng.integers(0, 3, (8, 3)).astype("float32")
    weight[6:] = 0
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, y[..., None], -1)[..., 0]
    expected = (nats * weight).sum() / weight.sum()
    loss = common.TokenLoss()
    np.testing.assert_allclose(loss(y, logits, weight), expected, rtol=1e-6)
    np.testing.assert_allclose(loss(y, logits), nats.mean(), rtol=1e-6)
    assert float(loss(y, logits, np.zeros((8, 3)))) == 0
    config = dataclasses.replace(CONFIG, distribution="mirrored", batch_size=8)
    strategy = common.make_strategy(config)
    batches = tf.data.Dataset.from_tensors((y, logits, weight)).unbatch()
    parts = iter(strategy.experimental_distribute_dataset(batches.batch(8)))
    function = tf.function(lambda part: strategy.run(loss, args=part))
    found = strategy.reduce("SUM", function(next(parts)), axis=None)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    np.testing.assert_allclose(again(y, logits, weight), expected, rtol=1e-6)


OTHERS = {
    "imagenet64": {"image_size": 4, "sample_images": 0, "local_window": None},
    "protein": {"sequence_length": 24, "local_window": None},
}


def train_other(pipeline, folder, **changes):
    """A run of another pipeline on what it brings along; its callbacks'."""
    module = importlib.import_module(f"examples.{pipeline}.train")
    options = {
        field.name: getattr(CONFIG, field.name)
        for field in dataclasses.fields(common.TrainingConfig)
    }
    options |= {"feature_map": "relu", "batch_size": 8, **OTHERS[pipeline]}
    config = module.configs.Config(
        **{**options, "validation_batches": 2, **changes}
    )
    module.train(config, None, str(folder), verbose=0)
    with open(folder / "curve.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", OTHERS)
def test_the_others_go_on_too(pipeline, tmp_path, monkeypatch):
    # Padding, masks and learned positions are what these have.
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_other(pipeline, whole)
    with monkeypatch.context() as patch:
        patch.setattr(
            backup.Backup,
            "on_epoch_end",
            killing(backup.Backup, "on_epoch_end", 2),
        )
        with pytest.raises(Killed):
            train_other(pipeline, broken)
    train_other(pipeline, broken)
    assert_same(weights(broken), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", OTHERS)
def test_replicas_train_the_others_as_one_device(pipeline, tmp_path):
    # The weights of the masked task's replicas differ in sum.
    change = {"task": "masked"} if pipeline == "protein" else {}
    one = train_other(pipeline, tmp_path / "a", **change)
    many = train_other(
        pipeline, tmp_path / "b", distribution="mirrored", **change
    )
    for row, other in zip(one, many, strict=True):
        for name in ("loss", "val_loss"):
            assert float(other[name]) == pytest.approx(
                float(row[name]), rel=1e-4
            )


def test_a_batch_must_fit_the_replicas():
    config = dataclasses.replace(CONFIG, distribution="mirrored", batch_size=5)
    with pytest.raises(common.UserError, match="a multiple of the 2 replicas"):
        common.make_strategy(config)


def test_a_missing_tpu_is_told():
    config = dataclasses.replace(CONFIG, distribution="tpu")
    with pytest.raises(common.UserError, match="finds no TPU.*tpu"):
        common.make_strategy(config)


@pytest.mark.parametrize("distribution", ["mirrored", "tpu"])
@pytest.mark.parametrize(
    "name, value", [("jit_compile", True), ("dtype_policy", "mixed_float16")]
)
def test_what_replicas_cannot_do_is_refused(distribution, name, value):
    change = {"distribution": distribution, name: value}
    with pytest.raises(common.UserError, match=f"`{name}`.*with replicas"):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_row_read_often_has_one_gradient(clip):
    # Row 0 of a table was read three times: the norm is that of the sum.
    slices = tf.IndexedSlices(
        tf.ones((4, 2)), tf.constant([0, 0, 0, 1]), tf.constant([3, 2])
    )
    optimizer = common.make_optimizer(0.1, 0, 10, 0.0, clip)
    (found,) = optimizer._clip_gradients([slices])
    dense = np.array([[3.0, 3.0], [1.0, 1.0], [0.0, 0.0]])
    norm = 1.0 if clip is None else np.linalg.norm(dense)
    np.testing.assert_allclose(found, dense / norm, rtol=1e-6)


def test_weights_that_broke_in_the_last_step_are_not_kept():
    guard = common.StopWhenNotFinite()
    guard.set_model(keras.Sequential([keras.Input((2,))]))
    guard.model.compile(common.make_optimizer(0.1, 0, 8, 0.0, None), "mse")
    guard.on_epoch_end(0, {"loss": 1.0, "val_loss": 2.0})
    with pytest.raises(common.UserError, match="loss became nan at step 0"):
        guard.on_epoch_end(0, {"loss": 1.0, "val_loss": float("nan")})
    # It comes before whatever keeps weights.
    kinds = [type(one) for one in common.training_callbacks("x", "val_loss")]
    keepers = [
        index
        for index, kind in enumerate(kinds)
        if issubclass(kind, keras.callbacks.ModelCheckpoint)
    ]
    assert kinds.index(common.StopWhenNotFinite) < min(keepers)


def test_throughput_leaves_validation_out():
    throughput = common.Throughput(100)
    throughput.on_epoch_begin(0)
    time.sleep(0.2)
    for batch in range(5):
        throughput.on_train_batch_end(batch)
    time.sleep(2.0)
    logs = {}
    throughput.on_epoch_end(0, logs)
    # 500 tokens in 0.2 s; with the validation it would be below 250.
    assert 250 < logs["tokens_per_second"] <= 2500
