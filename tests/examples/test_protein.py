"""The language models of examples/protein from their flags to the scores."""

import csv
import dataclasses
import gzip
import json
import math

import keras
import numpy as np
import pytest
from absl import flags

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")

from examples import common
from examples.protein import config as configs
from examples.protein import data
from examples.protein import evaluate
from examples.protein import train

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

TINY = [
    "--sequence_length=32",
    "--batch_size=4",
    "--num_layers=1",
    "--num_heads=2",
    "--hidden_dim=16",
    "--intermediate_dim=32",
    "--num_features=8",
    "--warmup_steps=2",
    "--learning_rate=0.01",
]
every_task = pytest.mark.parametrize("task", configs.TASKS)


def parse(*arguments):
    flag_values = flags.FlagValues()
    train.define_flags(flag_values)
    flag_values(["train", *arguments])
    return flag_values


def tiny_config(*arguments):
    flag_values = parse(*TINY, *arguments)
    return common.config_from_flags(configs.PRESETS, flag_values)


@pytest.fixture
def families(tmp_path):
    """Proteins of one motif, so that a few steps teach it; M is commonest."""
    for split, seed in (("train", 0), ("validation", 1)):
        rng = np.random.default_rng(seed)
        text = "".join(
            f">{i}\n{'MKVM' * rng.integers(3, 14)}\n" for i in range(16)
        )
        text += ">short\nMX\n>empty\n"
        path = tmp_path / f"{split}.fasta.gz"
        path.write_bytes(gzip.compress(text.encode()))
    return str(tmp_path)


# --- scores ----------------------------------------------------------------


def test_perplexity_by_hand():
    # Probabilities 1/2 and 1/8 cost 1 and 3 bits: 2 a residue.
    logits = np.log([[[0.5, 0.5], [0.875, 0.125], [0.1, 0.9]]])
    y, weight = np.array([[0, 1, 0]]), np.array([[1.0, 1.0, 0.0]])
    metric = evaluate.Perplexity()
    metric.update_state(y, logits, weight)
    assert float(metric.result()) == pytest.approx(4.0, rel=1e-5)
    metric.update_state(y, logits, np.array([[1.0, 0.0, 0.0]]))
    assert float(metric.result()) == pytest.approx(2 ** (5 / 3), rel=1e-5)
    metric.reset_state()
    assert float(metric.result()) == 1.0
    again = evaluate.Perplexity.from_config(metric.get_config())
    assert again.name == "perplexity"


def ids(text):
    return data.encode(text, len(text))[0]


def make_proteins(*sequences):
    parts = [[data.MARK]]
    for sequence in sequences:
        parts += [ids(sequence), [data.MARK]]
    starts = np.cumsum([1] + [len(sequence) + 1 for sequence in sequences])
    return data.Proteins(
        np.concatenate(parts).astype("uint8"), starts.astype("int64"), 0, {}
    )


def test_unigram_by_hand(tmp_path):
    # Each of 25 residues counts once more than it occurs; X never.
    unigram = evaluate.Unigram(make_proteins("MMMMK", "XX").counts())
    assert unigram.likeliest == ids("M")[0]
    nats = unigram.nats[ids("MKW")]
    np.testing.assert_allclose(np.exp(-nats), [5 / 30, 2 / 30, 1 / 30])
    unigram.write(str(tmp_path))
    again = evaluate.Unigram.read(str(tmp_path))
    np.testing.assert_array_equal(again.nats, unigram.nats)
    for content in ("{}", "[1]", "no json"):
        (tmp_path / "unigram.json").write_text(content)
        with pytest.raises(common.UserError, match="unigram.json cannot be"):
            evaluate.Unigram.read(str(tmp_path))
    with pytest.raises(common.UserError, match="absent.unigram.json"):
        evaluate.Unigram.read(str(tmp_path / "absent"))


@every_task
def test_scores_of_a_model_that_knows_nothing_but_m_by_hand(task):
    favoured = np.zeros(data.VOCABULARY_SIZE, "float32")
    favoured[ids("M")] = math.log(2.0)

    def model(x):
        return tf.zeros(x.shape + [1]) + favoured

    proteins = make_proteins("MKVM" * 30, "X", "MX")
    unigram = evaluate.Unigram(make_proteins("KKKM").counts())
    config = tiny_config(f"--task={task}")
    own, floor = evaluate.score(model, proteins, config, unigram, verbose=0)
    dataset = data.evaluation_dataset(proteins, config)
    found = np.concatenate(
        [y[weight > 0] for _, y, weight in dataset.as_numpy_iterator()]
    )
    if task == "unidirectional":
        assert len(found) == 121
    else:
        assert 3 < len(found) < 30  # about 15 of 121
    m, k, v = ((found == i).sum() for i in ids("MKV"))
    total = data.VOCABULARY_SIZE + 1
    expected = m * math.log(total / 2) + (k + v) * math.log(total)
    assert own.residues == floor.residues == len(found)
    assert own.nats == pytest.approx(expected, rel=1e-5)
    assert own.accuracy == pytest.approx(m / len(found))
    assert own.perplexity == pytest.approx(math.exp(expected / len(found)))
    # 4 + 25 counts: K has 4, M has 2 and V has 1.
    expected = (
        k * math.log(29 / 4) + m * math.log(29 / 2) + v * math.log(29)
    )
    assert floor.nats == pytest.approx(expected)
    assert floor.accuracy == pytest.approx(k / len(found))
    lines = evaluate.table([own, floor]).split("\n")
    assert lines[1].startswith("model") and lines[2].startswith("unigram")
    assert f"{own.perplexity:.3f}" in lines[1]
    assert f"{floor.accuracy:.2%}" in lines[2]


def test_a_score_of_nothing_and_of_everything():
    assert math.isnan(evaluate.Score("a").accuracy)
    assert math.isnan(evaluate.Score("a").perplexity)
    assert evaluate.Score("a", 1, 0, 1e5).perplexity == math.inf


# --- the model -------------------------------------------------------------


@every_task
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--feature_map=exact"],
        ["--feature_map=relu"],
        ["--notie_embeddings", "--dtype_policy=mixed_bfloat16"],
    ],
    ids=" ".join,
)
def test_o64_loss_at_initialisation_is_near_log_vocabulary(task, arguments):
    config = tiny_config(f"--task={task}", *arguments)
    model = train.build_model(config)
    proteins = data.load(None, "train")
    (x, y, weight), = data.training_dataset(proteins, config).take(1)
    logits = model(x)
    assert logits.shape == (4, 32, data.VOCABULARY_SIZE)
    assert logits.dtype == "float32"
    nats = np.average(common.token_nats(y, logits), weights=weight)
    # Logits of variance s^2 cost about s^2 / 2 above log V: half a nat allows
    # s = 1. Masked places all read the same mask, and so share one draw of
    # the logits, which does not average out: as much again.
    allowed = 0.5 if config.causal else 1.0
    assert abs(nats - math.log(data.VOCABULARY_SIZE)) < allowed


def test_the_unidirectional_model_is_causal_and_the_masked_one_is_not():
    x = np.random.default_rng(0).integers(2, 22, [1, 20])
    changed = x.copy()
    changed[0, 12:] = 2
    for task in configs.TASKS:
        model = train.build_model(tiny_config(f"--task={task}"))
        difference = np.abs(np.array(model(x)) - np.array(model(changed)))
        before, after = difference[:, :12].max(), difference[:, 12:].max()
        assert after > 1e-3
        if task == "unidirectional":
            assert before < 1e-5
        else:
            assert before > 1e-4


@every_task
@pytest.mark.parametrize("feature_map", ["favor+", "relu", "exact"])
def test_padding_changes_nothing(task, feature_map, tmp_path):
    config = tiny_config(f"--task={task}", f"--feature_map={feature_map}")
    config = dataclasses.replace(config, num_layers=2)
    model = train.build_model(config)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(0).integers(2, 22, [2, 20])
    alone = np.array(model(x))
    for padding in (1, 12, 50):
        padded = np.pad(x, [(0, 0), (0, padding)])
        for one in (model, loaded):
            logits = np.array(one(padded))
            assert np.isfinite(logits).all()
            np.testing.assert_allclose(logits[:, :20], alone, atol=1e-5)
    assert np.isfinite(np.array(model(np.zeros([1, 8], "int32")))).all()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--task=masked", "--feature_map=relu"],
        # Its statistics are of tokens that are there.
        pytest.param(
            ["--task=unidirectional", "--feature_map=favor++"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_padding_changes_no_loss_and_no_gradient(arguments):
    config = tiny_config(*arguments)
    x = np.random.default_rng(0).integers(2, 22, [2, 20])
    weight = (x < 6).astype("float32")
    results = []
    for padding in (0, 30):
        keras.utils.set_random_seed(1)
        model = train.build_model(config)
        common.compile_model(model, config, [evaluate.Perplexity()])
        arrays = [
            np.pad(array, [(0, 0), (0, padding)]) for array in (x, x, weight)
        ]
        logs = model.train_on_batch(*arrays, return_dict=True)
        # The first step of AdamW goes the same way for any small gradient;
        # the second moment tells of its size.
        moments = [np.array(v) for v in model.optimizer._velocities]
        moments += [
            np.array(v)
            for v in model.non_trainable_variables
            if "seed" not in v.path
        ]
        results.append((logs, moments))
    (short, moments), (long, others) = results
    for name, value in short.items():
        assert value == pytest.approx(long[name], rel=1e-5), name
    for one, other in zip(moments, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-9)


def test_a_value_that_a_layer_refuses_is_a_user_error():
    with pytest.raises(common.UserError, match="cannot be built.*softmaxx"):
        train.build_model(tiny_config("--feature_map=softmaxx"))
    with pytest.raises(common.UserError, match="local_window"):
        train.build_model(tiny_config("--task=masked", "--local_window=4"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", configs.PRESETS)
def test_presets_build(preset):
    config = configs.PRESETS[preset]()
    model = train.build_model(config)
    shape = (config.batch_size, config.sequence_length)
    logits = model.compute_output_spec(keras.KerasTensor(shape, "int32"))
    assert logits.shape == (*shape, data.VOCABULARY_SIZE)
    if preset == "paper":
        # 36 blocks of 4 d^2 weights of attention and 2 d * 1024 beside it.
        expected = 36 * (4 * 512**2 + 2 * 512 * 1024)
        assert model.count_params() == pytest.approx(expected, rel=0.02)


def test_config_errors_name_the_field():
    for changes, named in (
        ({"task": "both"}, "task.*'both'"),
        ({"sequence_length": 1}, "sequence_length=1"),
        ({"num_heads": 3}, "multiple of num_heads=3"),
        (
            {"task": "masked", "feature_map": "window"},
            "exact window.*feature_map='window'",
        ),
        (
            {"task": "masked", "feature_map": "favor+", "far_weight": 1.0},
            "exact window.*far_weight=1.0",
        ),
    ):
        with pytest.raises(common.UserError, match=named):
            configs.Config(**changes)
    with pytest.raises(flags.IllegalFlagValueError, match="masked"):
        parse("--task=both")


# --- from the command line to the scores -----------------------------------


def read_curve(folder):
    with open(folder / "curve.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@every_task
def test_a_run_from_flags_to_scores(
    task, families, tmp_path, capsys, no_network
):
    folder = tmp_path / "run"
    own, floor = train.main(
        parse(
            *TINY,
            f"--task={task}",
            "--steps=40",
            "--validation_every=20",
            f"--data_dir={families}",
            f"--output_dir={folder}",
        )
    )
    printed = capsys.readouterr().out
    assert "17 sequences" in printed and "never predicted: X 1" in printed
    assert "skipped: 1 empty records" in printed
    # Half of the residues are M.
    assert floor.accuracy == pytest.approx(0.5, abs=0.1)
    assert own.perplexity < floor.perplexity

    curve = read_curve(folder)
    assert [row["step"] for row in curve] == ["20", "40"]
    best = min(float(row["val_perplexity"]) for row in curve)
    assert own.perplexity == pytest.approx(best, rel=1e-5)
    assert (folder / "curve.png").stat().st_size > 1000
    assert not (folder / "backup.npz").exists()
    difference = printed.split("difference of a logit: ")[1].split()[0]
    assert float(difference) < 1e-4

    for name in ("best.keras", "saved_model"):
        flag_values = flags.FlagValues()
        evaluate.define_flags(flag_values)
        flag_values(
            ["evaluate", f"--model={folder / name}", f"--data_dir={families}"]
        )
        evaluate.main(flag_values)
        printed = capsys.readouterr().out
        assert f"task: {task}" in printed
        for line, one in zip(printed.split("\n")[-3:], (own, floor)):
            name, residues, _, perplexity = line.split()
            assert (name, residues) == (one.name, str(one.residues))
            assert float(perplexity) == pytest.approx(one.perplexity, abs=2e-3)

    # A file alone, whatever the split.
    path = f"{families}/train.fasta.gz"
    scores = evaluate.evaluate(
        str(folder / "best.keras"), path, "test", verbose=0
    )
    assert scores[0].residues > 0


def test_o65_train_without_any_data(tmp_path, capsys, no_network):
    arguments = ["--steps=1", "--validation_every=1", "--concatenate"]
    train.main(parse(*TINY, *arguments, f"--output_dir={tmp_path}"))
    printed = capsys.readouterr().out
    assert "proteins: the 200 of UniProt" in printed
    assert "160 sequences" in printed


def test_training_refuses_one_file(families, tmp_path):
    path = f"{families}/train.fasta.gz"
    with pytest.raises(common.UserError, match="folder.*train.fasta.gz"):
        train.train(tiny_config(), path, str(tmp_path))


def test_models_that_cannot_be_evaluated_are_named(families, tmp_path):
    def expect(message):
        path = str(tmp_path / "alone.keras")
        with pytest.raises(common.UserError, match=message):
            evaluate.evaluate(path, families, "validation", verbose=0)

    expect("no file or folder .*alone.keras")
    train.build_model(tiny_config()).save(tmp_path / "alone.keras")
    expect("none at .*config.json")
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": "bytes"}))
    expect("config.json was not written")
    common.claim_folder(tiny_config(), None, str(tmp_path))
    expect("unigram.json cannot be read")
