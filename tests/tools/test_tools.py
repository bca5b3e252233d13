"""The commands that measure the far part and the estimators."""

import csv
import json
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
from absl import flags

import keras_performer
from examples import common
from tools import approximation_error
from tools import benchmark
from tools import far_field

pytestmark = pytest.mark.tensorflow_only("the tools are TensorFlow's")


def options_of(module, *arguments):
    values = flags.FlagValues()
    module.define_flags(values)
    values(["command", *arguments])
    return values


def test_recall_asks_for_what_was_shown():
    distance = 50
    ids, targets, weights = far_field.recall_data(
        20, distance, np.random.default_rng(0)
    )
    assert ids.shape[:2] == targets.shape == weights.shape
    for row in range(20):
        shown = {}
        for place, (key, value) in enumerate(ids[row]):
            if weights[row, place] == 0 and key:
                assert key not in shown
                shown[key] = value, place
        assert len(shown) == far_field.PAIRS
        for place in np.flatnonzero(weights[row]):
            key, value = ids[row, place]
            # The question does not hold its own answer.
            assert value == far_field.VALUES
            answer, first = shown[key]
            assert targets[row, place] == answer
            assert place - first >= distance
    # Chance is what the tool says: answers are uniform.
    counts = np.bincount(targets[weights > 0], minlength=far_field.VALUES)
    assert np.all(counts > 0)


def test_copy_repeats_the_passage():
    distance = 60
    ids, targets, weights = far_field.copy_data(
        20, distance, np.random.default_rng(0)
    )
    for row in range(20):
        places = np.flatnonzero(weights[row])
        assert len(places) == far_field.PASSAGE
        answers = targets[row, places]
        assert len(set(answers)) == far_field.PASSAGE
        np.testing.assert_array_equal(answers, ids[row, places + 1])
        np.testing.assert_array_equal(answers, ids[row, 1 : len(places) + 1])
        # What is asked for stands nowhere between.
        between = ids[row, len(places) + 1 : places[0]]
        assert not set(answers) & set(between)
        assert places[0] + 1 - 1 == distance


@pytest.mark.slow
def test_a_grid_is_run_once_and_written(tmp_path, capsys):
    arguments = (
        f"--output_dir={tmp_path}",
        "--tasks=recall",
        "--variants=window alone",
        "--steps=2",
        "--checkpoints=1",
        "--distance=20",
        "--batch_size=2",
        "--num_features=8",
        "--num_layers=1",
        "--width=8",
    )
    far_field.main(options_of(far_field, *arguments))
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    assert [run["variant"] for run in runs] == ["window alone"]
    assert all(0 <= run["curve"][-1] <= 1 for run in runs)
    table = (tmp_path / "table.md").read_text()
    assert "| window alone | 0." in table and "recall over 20" in table
    assert (tmp_path / "far_field.png").stat().st_size > 5000
    # A second kind, finished as well: nothing is run again, both are shown.
    lines.append(json.dumps({**runs[0], "variant": "hedgehog"}))
    # A run of other settings stays where it is and is not shown.
    lines.append(json.dumps({**runs[0], "variant": "favor+", "steps": 4}))
    path.write_text("\n".join(lines) + "\n")
    arguments += ("--variants=hedgehog,window alone",)
    far_field.main(options_of(far_field, *arguments))
    assert path.read_text().splitlines() == lines
    shown = capsys.readouterr().out
    assert "| window alone | 0." in shown and "| hedgehog | 0." in shown
    assert "| favor+" not in shown


@pytest.mark.parametrize(
    "argument",
    ["--tasks=juggle", "--variants=best", "--checkpoints=3"],
)
def test_a_wrong_flag_of_far_field_is_named(tmp_path, argument):
    options = options_of(
        far_field, f"--output_dir={tmp_path}", "--steps=4", argument
    )
    with pytest.raises(common.UserError, match=argument.split("=")[0]):
        far_field.main(options)


def test_errors_fall_with_the_number_of_features(tmp_path, capsys):
    approximation_error.main(
        options_of(
            approximation_error,
            f"--output_dir={tmp_path}",
            "--length=64",
            "--scale=0.7",
            "--num_features=16,128",
            "--estimators=positive iid,favor++ orthogonal antithetic "
            "(favor++)",
        )
    )
    with open(tmp_path / "errors.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    error = {
        (row["estimator"].split()[0], int(row["num_features"])): (
            float(row["mean"]),
            float(row["standard_error"]),
        )
        for row in rows
    }
    for name in ("positive", "favor++"):
        few, few_error = error[name, 16]
        many, many_error = error[name, 128]
        assert few - many > 3 * np.hypot(few_error, many_error)
    assert error["favor++", 128][0] < error["positive", 128][0]
    assert (tmp_path / "approximation_error.png").stat().st_size > 5000
    assert "| positive iid |" in (tmp_path / "table.md").read_text()
    assert "M=128" in capsys.readouterr().out


def test_errors_on_the_activations_of_a_model(tmp_path):
    ids = keras.Input((None,), dtype="int32")
    x = keras_performer.TokenAndPositionEmbedding(257, 64, 8)(ids)
    x = keras_performer.PerformerBlock(2, 8, feature_map="exact")(x)
    keras.Model(ids, x).save(tmp_path / "model.keras")
    (tmp_path / "text.txt").write_bytes(bytes(range(60)))
    arguments = [
        f"--output_dir={tmp_path}",
        f"--model={tmp_path / 'model.keras'}",
        f"--text={tmp_path / 'text.txt'}",
        "--num_features=16,4096",
        "--draws=4",
        "--estimators=favor++ iid",
    ]
    options = options_of(approximation_error, *arguments, "--length=50")
    approximation_error.main(options)
    with open(tmp_path / "errors.csv", newline="") as file:
        few, many = (float(row["mean"]) for row in csv.DictReader(file))
    # 256 times as many features: the variance falls by as much, less the
    # bias of few.
    assert 0 < many < 0.1 * few
    options = options_of(approximation_error, *arguments, "--length=64")
    with pytest.raises(common.UserError, match="60 bytes"):
        approximation_error.main(options)


@pytest.mark.parametrize(
    "argument",
    [
        "--estimators=best",
        "--num_features=7",
        "--num_features=many",
        "--num_features=",
        "--draws=0",
        "--dim=1",
        "--model=missing.keras",
    ],
)
def test_a_wrong_flag_of_approximation_error_is_named(tmp_path, argument):
    options = options_of(
        approximation_error, f"--output_dir={tmp_path}", argument
    )
    with pytest.raises(common.UserError, match=argument.split("=")[0]):
        approximation_error.main(options)


def test_a_benchmark_writes_ratios(tmp_path, capsys):
    options = options_of(
        benchmark,
        f"--output_dir={tmp_path}",
        "--levels=op",
        "--kinds=bidirectional",
        "--lengths=64",
        "--contenders=exact,returns the values",
        "--jit_compile=false",
        "--repeats=2",
        "--heads=1",
        "--dim=8",
        "--num_features=8",
    )
    benchmark.main(options)
    rows = json.loads((tmp_path / "benchmark.json").read_text())
    names = [row["contender"] for row in rows]
    assert names == 2 * [
        "keras-performer",
        "returns the values",
        "exact",
        "floor",
    ]
    assert {row["what"] for row in rows} == {"forward", "forward+gradient"}
    for row in rows:
        assert 0 < row["least"] <= row["seconds"] <= row["most"]
        assert (row["ratio"] == 1) == (row["contender"] == "keras-performer")
    table = (tmp_path / "table.md").read_text()
    assert "| bidirectional, forward, without XLA | 64 |" in table
    assert "exact is slower" in table
    assert "does not fit" not in table
    lines = (tmp_path / "benchmark.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows)
    assert "over the floor" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_is_measured_beside_one_that_does_not_fit(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(benchmark.MODELS, "tiny", (1, 1, 8, 8))
    child = {"model": "tiny", "causal": True, "length": 8, "repeats": 2}
    rows = []
    for contender in ("keras-performer", "returns the values"):
        benchmark.run_child({**child, "contender": contender})
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert len(found["seconds"]) == 2
        rows.append(
            {
                "level": "model",
                "kind": "tiny",
                "what": "training step",
                "jit_compile": True,
                "length": 8,
                "contender": contender,
                "seconds": found["seconds"][0],
                "memory": found["memory"],
                "ratio": 1.0,
            }
        )
    rows.append(
        {**rows[0], **benchmark.NOT_FITTING, "contender": "exact"}
    )
    table = benchmark.table(rows)
    assert "does not fit" in table and "GiB" in table
    benchmark.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_a_forward_pass_is_taken_apart(tmp_path):
    options = options_of(
        benchmark,
        f"--output_dir={tmp_path}",
        "--levels=parts",
        "--kinds=window",
        "--lengths=200,256",
        "--repeats=2",
        "--heads=1",
        "--dim=8",
        "--num_features=8",
    )
    benchmark.main(options)
    rows = json.loads((tmp_path / "benchmark.json").read_text())
    assert [(row["length"], row["contender"]) for row in rows] == [
        (256, name) for name in (benchmark.OURS, *benchmark.PARTS)
    ]
    assert all(row["seconds"] > 0 for row in rows)


def test_the_parts_are_the_work_of_the_floor():
    for kind in benchmark.KINDS:
        total = 0
        for equation, first, second in benchmark.chunk_products(
            kind, 3, 64, 256
        ):
            sizes = dict(zip(equation.split(",")[0], first))
            sizes |= dict(zip(equation.split(",")[1].split("->")[0], second))
            total += np.prod(list(sizes.values()))
        expected, _ = benchmark.work(kind, False, 64, 256)
        assert total == 3 * benchmark.CHUNK * expected


def _row(length, contender, seconds):
    ratio = None if seconds is None else 2.0
    return {
        "level": "op",
        "kind": "causal",
        "what": "forward",
        "jit_compile": True,
        "length": length,
        "contender": contender,
        "seconds": seconds,
        "least": seconds,
        "most": seconds,
        "ratio": ratio,
    }


def test_runs_are_merged_and_lengths_compared(tmp_path, capsys):
    for run, factor in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        rows = [
            _row(64, "keras-performer", factor * 2),
            _row(128, "keras-performer", factor * 5),
            _row(128, "exact", None if run == "b" else 40.0),
        ]
        (tmp_path / run).mkdir()
        # The longer ones first: merged, they are in order again.
        benchmark._write(rows[1:] + rows[:1], tmp_path / run)
    runs = ",".join(str(tmp_path / run) for run in "abc")
    options = options_of(
        benchmark, f"--output_dir={tmp_path}", f"--merge={runs}"
    )
    benchmark.main(options)
    rows = json.loads((tmp_path / "benchmark.json").read_text())
    assert [row["seconds"] for row in rows] == [4.0, 10.0, 40.0]
    assert [row["least"] for row in rows] == [2.0, 5.0, 40.0]
    assert [row["most"] for row in rows] == [6.0, 15.0, 40.0]
    out = capsys.readouterr().out
    assert "times as long as half the length, 128: 2.50" in out
    options = options_of(
        benchmark, f"--output_dir={tmp_path}", "--merge=missing"
    )
    with pytest.raises(common.UserError, match="--merge: missing"):
        benchmark.main(options)


def test_tokens_are_measured_beside_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "MODELS", {"tiny": (1, 1, 8, 8)})
    monkeypatch.setattr(benchmark, "DECODE_TOKENS", 3)
    options = types.SimpleNamespace(repeats=2)
    rows = benchmark.measure_decoding("tiny", (70, 80), options)
    assert [(row["length"], row["contender"]) for row in rows] == [
        (70, "keras-performer"),
        (70, "the whole text again"),
        (80, "keras-performer"),
        (80, "the whole text again"),
        (70, "a token after 70"),
        (80, "a token after 70"),
    ]
    assert all(0 < row["least"] <= row["seconds"] for row in rows)
    benchmark._write(rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| tiny, causal, a token | 70 |" in text and " ms (" in text


def test_what_does_not_fit_fails_in_its_own_process():
    # Reserved, not touched: without the limit Linux would promise it.
    code = (
        "from tools import benchmark\n"
        "benchmark.limit_memory()\n"
        "try: bytearray(int(0.95 * benchmark._total_memory()))\n"
        "except MemoryError: print('refused')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "refused\n"


@pytest.mark.parametrize("fitting", ["keras-performer", "exact"])
def test_models_run_in_processes_of_their_own(fitting, tmp_path, monkeypatch):
    def run(command, **kwargs):
        child = json.loads(command[-1].removeprefix("--child="))
        fits = child["contender"] == fitting
        return types.SimpleNamespace(
            returncode=0 if fits else 1,
            stdout='{"seconds": [2.0, 3.0, 4.0], "memory": 1000}',
            stderr="" if fits else "ResourceExhaustedError",
        )

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    options = types.SimpleNamespace(
        repeats=3, contenders=benchmark.MODEL_CONTENDERS
    )
    rows = benchmark.measure_model("small", True, 8, options)
    assert len(rows) == len(benchmark.MODEL_CONTENDERS)
    found = {row["contender"]: row["seconds"] for row in rows}
    assert found.pop(fitting) == 3.0
    assert set(found.values()) == {None}
    benchmark._write(rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert text.count("does not fit") == len(rows) - 1


@pytest.mark.parametrize(
    "argument",
    [
        "--levels=layer",
        "--lengths=long",
        "--models=huge",
        "--contenders=all",
        "--repeats=0",
    ],
)
def test_a_wrong_flag_of_benchmark_is_named(tmp_path, argument):
    options = options_of(benchmark, f"--output_dir={tmp_path}", argument)
    with pytest.raises(common.UserError, match=argument.split("=")[0]):
        benchmark.main(options)


def test_the_floor_counts_what_attention_costs():
    products, exponentials = benchmark.work("bidirectional", False, 64, 256)
    # Two projections of half the features, and two products with the sums.
    assert products == 64 * 256 + 2 * 256 * 65
    assert exponentials == 2 * 256
    for kind in benchmark.KINDS:
        forward = benchmark.work(kind, False, 64, 256)
        both = benchmark.work(kind, True, 64, 256)
        assert 2 < both[0] / forward[0] < 5
        # Those of the features once more in each pass that needs them.
        assert 2 <= both[1] / forward[1] <= 3
