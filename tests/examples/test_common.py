"""Flags made from a dataclass, the optimizer, and the callbacks."""

import csv
import dataclasses
import sys

import keras
import numpy as np
import pytest
from absl import flags

from examples import common
from examples.common import option

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")


@dataclasses.dataclass(frozen=True)
class Base:
    depth: int = option(2, "Layers.")
    rate: float | None = option(0.5, "A rate.")
    window: int | None = option(None, "A window.")
    kernel: str = option("relu", "A name.")
    kind: str = option("a", "A choice.", choices=("a", "b"))
    fast: bool = option(False, "A switch.")

    def __post_init__(self):
        common.check(self, "depth", self.depth > 0, "a positive integer")


@dataclasses.dataclass(frozen=True)
class Deep(Base):
    depth: int = 9
    window: int | None = 64


PRESETS = {"deep": Deep}


def parse(*arguments):
    flag_values = flags.FlagValues()
    common.define_config_flags(PRESETS, "deep", flag_values)
    flag_values(["program", *arguments])
    return common.config_from_flags(PRESETS, flag_values)


def test_without_flags_the_preset_holds():
    assert parse() == Deep(depth=9, window=64)


@pytest.mark.parametrize(
    "argument, name, value",
    [
        ("--depth=3", "depth", 3),
        ("--rate=0.25", "rate", 0.25),
        ("--rate=none", "rate", None),
        ("--window=0", "window", 0),
        ("--window=None", "window", None),
        ("--kernel=exact", "kernel", "exact"),
        ("--kind=b", "kind", "b"),
        ("--fast", "fast", True),
        ("--nofast", "fast", False),
    ],
)
def test_a_flag_overrides_one_field(argument, name, value):
    expected = dataclasses.replace(Deep(), **{name: value})
    assert parse(argument) == expected


@pytest.mark.parametrize(
    "argument, error, named",
    [
        ("--preset=shallow", flags.IllegalFlagValueError, "shallow"),
        ("--deepth=3", flags.UnrecognizedFlagError, "deepth"),
        ("--depth=three", flags.IllegalFlagValueError, "depth=three"),
        ("--window=some", flags.IllegalFlagValueError, "window=some"),
        ("--kind=c", flags.IllegalFlagValueError, "<a|b>"),
        ("--depth=0", common.UserError, "positive integer. Received: depth=0"),
    ],
)
def test_what_is_unknown_is_an_error_that_names_it(argument, error, named):
    with pytest.raises(error) as caught:
        parse(argument)
    assert named in str(caught.value)


def test_run_prints_a_user_error_without_traceback(monkeypatch, capsys):
    def main():
        raise common.UserError("there is no such book")

    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as exit:
        common.run(main)
    assert exit.value.code == 1
    assert capsys.readouterr().err == "error: there is no such book\n"


def test_run_refuses_a_word_that_is_no_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "small"])
    with pytest.raises(SystemExit) as exit:
        common.run(lambda: pytest.fail("the command ran"))
    assert exit.value.code == 1
    assert "Unexpected argument 'small'" in capsys.readouterr().err


def test_weight_decay_leaves_out_norms_biases_and_embeddings():
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(5, 4, name="tokens"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(6, bias_initializer="ones", name="dense"),
        ]
    )
    optimizer = common.make_optimizer(1.0, 0, 10, 0.25, None)
    before = [variable.numpy() for variable in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    # A gradient of zero leaves nothing but the decay: w - rate * decay * w.
    optimizer.apply([np.zeros_like(value) for value in before])
    for variable, old in zip(model.trainable_variables, before, strict=True):
        factor = 0.75 if variable.path.endswith("dense/kernel") else 1.0
        np.testing.assert_allclose(variable.numpy(), factor * old, rtol=1e-6)


def test_learning_rate_rises_to_the_peak_and_falls_to_a_tenth():
    schedule = common.make_optimizer(
        2.0, 10, 110, 0.0, 1.0
    )._learning_rate
    rates = [float(schedule(step)) for step in (0, 5, 10, 60, 110, 500)]
    # Half way down, a cosine from 1 to 0.1 stands at 0.55.
    np.testing.assert_allclose(rates, [0, 1, 2, 1.1, 0.2, 0.2], rtol=1e-5)


def _regression(callbacks, targets):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(
        common.make_optimizer(0.1, 0, 8, 0.0, None), "mean_squared_error"
    )
    x = np.ones([8, 2], "float32")
    model.fit(
        x,
        targets,
        batch_size=2,
        epochs=2,
        shuffle=False,
        validation_data=(x, np.ones([8, 1])),
        callbacks=callbacks,
        verbose=0,
    )


def test_a_loss_that_is_no_number_stops_the_run_at_its_step(tmp_path):
    targets = np.ones([8, 1], "float32")
    targets[4] = np.nan  # in the third batch of two
    callbacks = common.training_callbacks(str(tmp_path), "val_loss")
    with pytest.raises(common.UserError, match="nan at step 3,.*rate"):
        _regression(callbacks, targets)
    assert not (tmp_path / "last.keras").exists()


def test_a_run_leaves_curve_checkpoints_and_events(tmp_path):
    callbacks = common.training_callbacks(str(tmp_path), "val_loss")
    _regression(callbacks, np.ones([8, 1], "float32"))
    with open(tmp_path / "curve.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["4", "8"]
    assert float(rows[1]["val_loss"]) < float(rows[0]["val_loss"])
    assert list(rows[0]) == ["step", "learning_rate", "loss", "val_loss"]
    assert (tmp_path / "best.keras").exists()
    assert (tmp_path / "last.keras").exists()
    assert list(tmp_path.glob("tensorboard/*/validation/events*"))


def test_the_curve_is_drawn_from_its_file(tmp_path):
    (tmp_path / "curve.csv").write_text(
        "step,bits,val_bits\n10,8.0,7.5\n20,6.0,6.5\n"
    )
    common.draw_curve(str(tmp_path), "bits", "bits per dimension")
    picture = keras.utils.img_to_array(
        keras.utils.load_img(tmp_path / "curve.png")
    )
    # Two lines of two colours on white.
    blue = picture[..., 2] - picture[..., 0] > 100
    orange = picture[..., 0] - picture[..., 2] > 100
    assert blue.sum() > 100 and orange.sum() > 100
