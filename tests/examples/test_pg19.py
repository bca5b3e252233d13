"""The language model of examples/pg19 from its flags to its scores."""

import csv
import dataclasses
import functools
import json
import math
import types

import keras
import numpy as np
import pytest
from absl import flags

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("tensorflow_text", reason="the examples tokenise by it")

from examples import common
from examples.pg19 import config as configs
from examples.pg19 import data
from examples.pg19 import evaluate
from examples.pg19 import generate
from examples.pg19 import train
from keras_performer import PerformerLM

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

TINY = [
    "--sequence_length=32",
    "--batch_size=4",
    "--num_layers=1",
    "--num_heads=2",
    "--hidden_dim=16",
    "--intermediate_dim=32",
    "--num_features=8",
    "--local_window=4",
    "--warmup_steps=2",
    "--learning_rate=0.01",
]


def parse(*arguments):
    flag_values = flags.FlagValues()
    train.define_flags(flag_values)
    flag_values(["train", *arguments])
    return flag_values


def tiny_config(*arguments):
    flag_values = parse(*TINY, *arguments)
    return common.config_from_flags(configs.PRESETS, flag_values)


@pytest.fixture
def books(tmp_path):
    """Three little books whose text repeats, so that a few steps teach it."""
    for split, name, word in (
        ("train", "1", "sense and sensibility.\n"),
        ("validation", "7", "sense and tenseness.\n"),
        ("validation", "8", "sensibility\n"),
    ):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"{name}.txt").write_text(word * 40)
    (tmp_path / "metadata.csv").write_text("7,Seven,1811,url\n")
    return str(tmp_path)


@pytest.fixture
def small_model(monkeypatch):
    """For tests that are about all but the model: one that trains at once."""

    def build(config, vocabulary_size):
        return PerformerLM(
            vocabulary_size, 1, 1, 4, 4, 32, feature_map="relu", num_features=4
        )

    monkeypatch.setattr(train, "build_model", build)


# --- scores ----------------------------------------------------------------


def test_bits_per_byte_by_hand():
    # A byte of probability 1/4 costs 2 bits. The end mark (id 0) costs its 3
    # bits and is no byte; the padding is nothing.
    probabilities = [[0.5, 0.25, 0.25], [0.125, 0.4, 0.475], [0.1, 0.1, 0.8]]
    logits = np.log([probabilities])
    y, weight = np.array([[1, 0, 0]]), np.array([[1.0, 1.0, 0.0]])
    metric = evaluate.BitsPerByte()
    metric.update_state(y, logits, weight)
    assert float(metric.result()) == pytest.approx(2 + 3, rel=1e-6)
    metric.update_state(np.array([[1]]), np.log([[[0.25, 0.5, 0.25]]]))
    assert float(metric.result()) == pytest.approx((2 + 3 + 1) / 2, rel=1e-6)
    metric.reset_state()
    assert float(metric.result()) == 0.0


def test_bits_per_byte_of_pieces_divides_by_their_bytes():
    metric = evaluate.BitsPerByte([0, 0, 4])
    metric.update_state(
        np.array([[2, 2]]), np.log([[[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]])
    )
    assert float(metric.result()) == pytest.approx((1 + 2) / 8, rel=1e-6)
    again = evaluate.BitsPerByte.from_config(metric.get_config())
    assert again.bytes_per_token == [0, 0, 4]


def uniform(x):
    return tf.zeros(tf.concat([tf.shape(x), [257]], axis=0))


def test_scores_of_a_model_that_knows_nothing_by_hand():
    config = tiny_config()
    texts = ["two words " * 20, "", "x"]
    documents = [
        data.Document(str(i), str(i), data=text.encode())
        for i, text in enumerate(texts)
    ]
    scores, everything = evaluate.score(
        uniform, documents, data.ByteTokenizer(), config, verbose=0
    )
    # Each byte and each end mark costs log 257.
    for one, text in zip(scores, texts, strict=True):
        expected = (len(text) + 1) * math.log(257)
        assert one.nats == pytest.approx(expected, rel=1e-5)
    assert scores[0].words == 40
    assert scores[0].word_perplexity == pytest.approx(
        257 ** (201 / 40), rel=1e-4
    )
    assert math.isnan(scores[1].bits_per_byte)
    assert math.isnan(scores[1].word_perplexity)
    assert everything.bytes == 201 and everything.words == 41
    assert everything.bits_per_byte == pytest.approx(
        204 / 201 * math.log2(257), rel=1e-5
    )
    lines = evaluate.table(scores + [everything]).split("\n")
    assert len(lines) == 5 and lines[-1].startswith("all")
    assert f"{everything.bits_per_byte:.4f}" in lines[-1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_carried_state_gives_every_token_its_whole_past(jit_compile):
    config = tiny_config(f"--jit_compile={jit_compile}")
    model = train.build_model(config, 257)
    documents = [
        data.Document(str(size), "", data=(b"sense and " * 20)[:size])
        for size in (0, 31, 32, 150)
    ]
    tokenizer = data.ByteTokenizer()
    scores, everything = evaluate.score(
        model, documents, tokenizer, config, verbose=0, carry_state=True
    )
    for one, document in zip(scores, documents, strict=True):
        y = np.array([[byte + 1 for byte in document.data] + [0]])
        x = np.concatenate([[[0]], y[:, :-1]], axis=1)
        # The whole document at once, four times as long as a window.
        expected = np.sum(common.token_nats(y, model(x)))
        assert one.nats == pytest.approx(expected, rel=1e-5)
        assert one.bytes == len(document.data)
    # Windows that begin anew are another computation.
    windows, _ = evaluate.score(
        model, documents, tokenizer, config, verbose=0
    )
    assert windows[2].nats == pytest.approx(scores[2].nats, rel=1e-3)
    assert abs(windows[3].nats - scores[3].nats) > 1e-3
    assert everything.bytes == 213
    faded, _ = evaluate.score(
        model,
        documents,
        tokenizer,
        config,
        verbose=0,
        carry_state=True,
        far_half_life=8.0,
    )
    state, expected = model.get_initial_state(1), 0.0
    for start in range(0, y.shape[1], 32):
        part = slice(start, start + 32)
        state = model.fade(state, 32, 8.0)
        logits, state = model.step(x[:, part], state)
        expected += np.sum(common.token_nats(y[:, part], logits))
    assert faded[3].nats == pytest.approx(expected, rel=1e-5)
    assert abs(faded[3].nats - scores[3].nats) > 1e-3


def test_tensorboard_shows_a_continuation(tmp_path):
    model = train.build_model(tiny_config(), 257)
    write = functools.partial(
        train._show_text,
        data.ByteTokenizer(),
        data.Document("1", "One", data=b"It is a truth " * 30),
        tiny_config(),
    )
    samples = common.Samples(str(tmp_path), write)
    samples.set_model(model)
    samples.on_epoch_end(4)
    (path,) = tmp_path.iterdir()
    (event,) = [
        tf.compat.v1.Event.FromString(record.numpy())
        for record in tf.data.TFRecordDataset(str(path))
        if b"continuation" in record.numpy()
    ]
    assert event.step == 4
    (text,) = event.summary.value[0].tensor.string_val
    prompt, continuation = text.decode().split("|", 1)
    assert prompt == "    " + ("It is a truth " * 30)[:100]
    assert continuation


def test_unknown_words_are_counted_and_told():
    tokenizer = data.WordPieceTokenizer(["[DOC]", "[UNK]", "ab", "\u2581ab"])
    strange = data.Document("2", "Two", data="ab \u00fc ab".encode())
    scores, _ = evaluate.score(
        uniform, [strange], tokenizer, tiny_config(), verbose=0
    )
    assert scores[0].unknown == 1 and scores[0].bytes == 8
    assert "1 tokens are unknown words" in evaluate.table(scores)


# --- the model -------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--feature_map=exact", "--local_window=none"],
        ["--local_window=0"],
        ["--far_weight=0.1"],
        ["--feature_map=hedgehog", "--far_weight=0.1"],
        ["--feature_map=relu", "--local_window=none"],
        ["--notie_embeddings", "--dtype_policy=mixed_bfloat16"],
    ],
    ids=" ".join,
)
def test_o64_loss_at_initialisation_is_near_log_vocabulary(arguments):
    config = tiny_config(*arguments)
    model = train.build_model(config, 257)
    document = data.Document("1", "1", data=bytes(range(128)) * 4)
    x, y, _ = next(
        iter(
            data.training_dataset([document], data.ByteTokenizer(), config)
        )
    )
    logits = model(x)
    assert logits.shape == (4, 32, 257) and logits.dtype == "float32"
    nats = float(np.mean(common.token_nats(y, logits)))
    # Logits of variance s^2 cost about s^2 / 2 above log V; half a nat
    # allows s = 1, and a model that sees its target would be far below.
    assert abs(nats - math.log(257)) < 0.5


def test_the_model_is_causal():
    model = train.build_model(tiny_config(), 257)
    x = np.random.default_rng(0).integers(1, 257, [1, 20])
    changed = x.copy()
    changed[0, 12:] = 1
    before, after = np.array(model(x)), np.array(model(changed))
    np.testing.assert_allclose(before[:, :12], after[:, :12], atol=1e-5)
    assert np.abs(before[:, 12:] - after[:, 12:]).max() > 1e-3


def test_a_value_that_a_layer_refuses_is_a_user_error():
    with pytest.raises(common.UserError, match="cannot be built.*softmaxx"):
        train.build_model(tiny_config("--feature_map=softmaxx"), 257)
    with pytest.raises(common.UserError, match="local_window"):
        train.build_model(tiny_config("--feature_map=relu"), 257)


@pytest.mark.slow
@pytest.mark.parametrize("preset", configs.PRESETS)
def test_presets_build(preset):
    config = configs.PRESETS[preset]()
    model = train.build_model(config, config.vocabulary_size)
    shape = (config.batch_size, config.sequence_length)
    logits = model.compute_output_spec(keras.KerasTensor(shape, "int32"))
    assert logits.shape == (*shape, config.vocabulary_size)
    if preset == "paper":
        # Six blocks of 12 d^2 weights and the tied 32k vocabulary.
        expected = 6 * 12 * 512**2 + 32000 * 512
        assert model.count_params() == pytest.approx(expected, rel=0.02)


def test_config_errors_name_the_field():
    for arguments, named in (
        (["--num_heads=3"], "multiple of num_heads=3.*hidden_dim=16"),
        (["--steps=150"], "multiple of validation_every=100.*steps=150"),
        (["--num_layers=0"], "num_layers=0"),
        (["--dropout=1.0"], "dropout=1.0"),
        (["--gradient_clip=0"], "gradient_clip=0"),
        (["--far_weight=0"], "far_weight=0"),
        (["--feature_map=relu", "--far_weight=1"], "one of .*far_weight=1"),
        (["--vocabulary_size=300"], "257 for bytes.*=300"),
        (["--seed=2147483648"], "seed.*less than 2..31"),
        (["--learning_rate=inf"], "learning_rate=inf"),
        (["--far_weight=1", "--local_window=0"], "exact window.*far_weight=1"),
        (
            ["--feature_map=window", "--local_window=0"],
            "exact window.*feature_map='window'",
        ),
    ):
        with pytest.raises(common.UserError, match=named):
            tiny_config(*arguments)


def test_config_file_round_trip(tmp_path):
    config = tiny_config(
        "--local_window=none", "--gradient_clip=none", "--far_weight=0.5"
    )
    common.claim_folder(config, None, str(tmp_path))
    again = common.read_config(configs.Config, str(tmp_path))
    assert dataclasses.asdict(again) == dataclasses.asdict(config)
    (tmp_path / "config.json").write_text('{"depth": 3}')
    with pytest.raises(common.UserError, match="config.json was not written"):
        common.read_config(configs.Config, str(tmp_path))


# --- continuation ----------------------------------------------------------


def endpoint(*ids):
    """A `generate` that gives these ids, and notes what it was asked."""
    asked = []

    def generate(prompt, num_tokens, temperature, seed):
        asked.append([x.numpy().tolist() for x in (prompt, num_tokens)])
        return tf.constant([ids])

    return generate, asked


def test_continuation_ends_with_the_document():
    tokenizer = data.ByteTokenizer()
    generate, asked = endpoint(100, 101, 0, 102)
    assert train.continue_text(generate, tokenizer, "ab", 4) == "cd"
    assert asked == [[[[0, 98, 99]], 4]]
    generate, asked = endpoint(100, 101)
    assert train.continue_text(generate, tokenizer, "", 2) == "cd"
    assert asked == [[[[0]], 2]]
    assert train.continue_text(generate, tokenizer, "a", 0) == ""


@pytest.mark.parametrize(
    "feature_map", ["favor+", pytest.param("window", marks=pytest.mark.slow)]
)
def test_text_is_streamed_as_the_whole_model_continues_it(feature_map):
    model = train.build_model(
        tiny_config("--num_layers=1", f"--feature_map={feature_map}"), 257
    )
    tokenizer = types.SimpleNamespace(
        tokenize=data.ByteTokenizer().tokenize, detokenize=str
    )
    pieces = list(generate.stream(model, tokenizer, "ab", 12, temperature=0.0))
    ids = np.array([[0, 98, 99]])
    for _ in range(12):
        logits = np.asarray(model(ids))[0, -1]
        ids = np.append(ids, [[np.argmax(logits)]], axis=1)
    expected = [f"[{i}]" for i in ids[0, 3:].tolist()]
    end = expected.index("[0]") if "[0]" in expected else 12
    assert pieces == [*expected[:end], "[]"]

    # With a half-life, segments of a prompt fade, and then each token.
    prompt = "ab" * 9
    pieces = generate.stream(
        model, tokenizer, prompt, 9, far_half_life=4, temperature=0.0
    )
    ids = np.array([[0, *([98, 99] * 9)]])
    parts = [ids[:, i : i + 4] for i in range(0, 19, 4)]
    state, expected = model.get_initial_state(1), []
    while len(expected) < 9 and "[0]" not in expected:
        for part in parts:
            state = model.fade(state, part.shape[1], 4)
            logits, state = model.step(part, state)
        parts = [np.argmax(logits[:, -1:], axis=-1)]
        expected.append(f"[{parts[0][0, 0]}]")
    expected = [token for token in expected if token != "[0]"]
    assert list(pieces) == [*expected, "[]"]


def test_letters_of_several_bytes_are_streamed_whole(monkeypatch):
    text = "aé€𝄞b"
    ids = [byte + 1 for byte in text.encode()] + [0]
    model = types.SimpleNamespace(
        get_initial_state=lambda batch: {"position": tf.zeros(1, "int32")},
        fade=lambda state, count, half_life: state,
        step=lambda ids, state: (tf.zeros((1, 1, 257)), state),
    )

    def sample(logits, seed):
        return tf.gather(ids, seed[1:])

    monkeypatch.setattr(generate, "sample", sample)
    pieces = generate.stream(model, data.ByteTokenizer(), "x", 0)
    assert [piece for piece in pieces if piece] == list(text)


def test_what_cannot_be_streamed_is_named(tmp_path):
    config = tiny_config("--feature_map=exact", "--local_window=none")
    model = train.build_model(config, 257)
    path = str(tmp_path / "exact.keras")
    model.save(path)
    common.claim_folder(config, None, str(tmp_path))
    with pytest.raises(common.UserError, match="carry_state.*exact att"):
        evaluate.evaluate(path, None, "test", carry_state=True)
    with pytest.raises(common.UserError, match="far_half_life.*carry_state"):
        evaluate.evaluate(path, None, "test", far_half_life=9.0)
    flag_values = flags.FlagValues()
    generate.define_flags(flag_values)
    flag_values(["generate", f"--model={path}"])
    with pytest.raises(common.UserError, match="exact attention"):
        generate.main(flag_values)
    flag_values["model"].value = str(tmp_path / "none.keras")
    with pytest.raises(common.UserError, match="none.keras"):
        generate.main(flag_values)
    flag_values["top_p"].value = 0.0
    with pytest.raises(common.UserError, match="top_p"):
        generate.main(flag_values)


# --- from the command line to the scores -----------------------------------


def read_curve(folder):
    with open(folder / "curve.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_run_from_flags_to_text(books, tmp_path, capsys, no_network):
    folder = tmp_path / "run"
    train.main(
        parse(
            *TINY,
            "--steps=40",
            "--validation_every=20",
            f"--data_dir={books}",
            f"--output_dir={folder}",
            "--prompt=sense and ",
            "--sample_tokens=5",
        )
    )
    printed = capsys.readouterr().out
    assert "1 documents             920 bytes" in printed
    assert "the reloaded model continues [sense and ]" in printed

    curve = read_curve(folder)
    assert [row["step"] for row in curve] == ["20", "40"]
    best = min(float(row["val_bits_per_byte"]) for row in curve)
    # Eight bits are a random model's; forty steps learn these letters.
    assert best < 5.5
    assert float(curve[1]["loss"]) < float(curve[0]["loss"])

    for model in ("best.keras", "saved_model"):
        scores, everything = evaluate.evaluate(
            str(folder / model), books, "validation", verbose=0
        )
        assert [one.title for one in scores] == ["Seven", "8"]
        # The same sums in another order of float32 additions.
        assert everything.bits_per_byte == pytest.approx(best, rel=1e-5)
        assert everything.words == 40 * 3 + 40
        assert everything.word_perplexity == pytest.approx(
            math.exp(best * math.log(2) * everything.bytes / 160), rel=1e-3
        )
    assert f"{everything.bits_per_byte:.4f}" in printed
    difference = printed.split("difference of a logit: ")[1].split()[0]
    assert float(difference) < 1e-4

    flag_values = flags.FlagValues()
    generate.define_flags(flag_values)
    path = folder / "best.keras"
    flag_values(["generate", f"--model={path}", "--num_tokens=5"])
    generate.main(flag_values)
    assert capsys.readouterr().out.startswith("The value of ")


def test_o65_train_without_any_data(tmp_path, capsys, no_network):
    # main() with no --data_dir: what the command does in an empty checkout.
    arguments = ["--steps=1", "--validation_every=1", "--sample_tokens=3"]
    arguments.append(f"--output_dir={tmp_path}")
    everything = train.main(parse(*TINY, *arguments))
    documents = data.load(None, "validation")
    assert everything.bytes == sum(one.num_bytes for one in documents)
    printed = capsys.readouterr().out
    assert "text: the documentation inside Python" in printed
    assert "the reloaded model continues" in printed


@pytest.mark.slow
def test_train_with_a_learned_vocabulary(
    books, tmp_path, capsys, small_model
):
    folder = tmp_path / "run"
    arguments = ["--tokenizer=wordpiece", "--vocabulary_size=60"]
    config = tiny_config(
        *arguments, "--sequence_length=16", "--steps=2", "--validation_every=2"
    )
    _, tokenizer = train.train(config, books, str(folder), verbose=0)
    assert "learning it" in capsys.readouterr().out
    assert 10 < tokenizer.vocabulary_size <= 60
    lines = (folder / "vocabulary.txt").read_text().splitlines()
    assert lines[:2] == ["[DOC]", "[UNK]"]

    _, everything = evaluate.evaluate(
        str(folder / "best.keras"), books, "validation", verbose=0
    )
    # All letters are known, so the pieces' bytes are the file's bytes.
    assert everything.unknown == 0
    assert everything.bits_per_byte == pytest.approx(
        float(read_curve(folder)[0]["val_bits_per_byte"]), rel=1e-5
    )

    documents = data.load(books, "train")
    again = train.make_tokenizer(config, documents, None, str(folder))
    assert "from an earlier run" in capsys.readouterr().out
    assert again.vocabulary_size == tokenizer.vocabulary_size


def test_a_vocabulary_without_word_pieces_is_refused(tmp_path):
    with pytest.raises(common.UserError, match="--vocabulary=v.txt"):
        train.make_tokenizer(tiny_config(), [], "v.txt", str(tmp_path))


@pytest.mark.parametrize("left", [common.BACKUP, "best.keras"])
def test_the_vocabulary_of_a_run_stays(left, tmp_path):
    config = tiny_config("--tokenizer=wordpiece", "--vocabulary_size=60")
    run, given = tmp_path / "run", str(tmp_path / "given.txt")
    run.mkdir()
    data.WordPieceTokenizer(["[DOC]", "[UNK]", "ab"]).write(given)
    (run / left).touch()  # of a run of bytes: no vocabulary
    train.make_tokenizer(config, [], given, str(run))
    kept = (run / "vocabulary.txt").read_text()
    data.WordPieceTokenizer(["[DOC]", "[UNK]", "cd"]).write(given)
    with pytest.raises(common.UserError, match="--vocabulary: .*another one"):
        train.make_tokenizer(config, [], given, str(run))
    assert (run / "vocabulary.txt").read_text() == kept
    (run / left).unlink()
    train.make_tokenizer(config, [], given, str(run))
    assert "cd" in (run / "vocabulary.txt").read_text()


def test_models_that_cannot_be_evaluated_are_named(books, tmp_path):
    def expect(path, message):
        with pytest.raises(common.UserError, match=message):
            evaluate.evaluate(str(path), books, "validation", verbose=0)

    expect(tmp_path / "absent.keras", "no file or folder .*absent.keras")
    expect(tmp_path / "metadata.csv", "expected a .keras file.*metadata.csv")
    expect(tmp_path / "train", "--model: .*train")
    broken = tmp_path / "broken.keras"
    broken.write_text("no archive")
    expect(broken, "cannot load .*broken.keras")

    model = train.build_model(tiny_config(), 257)
    model.save(tmp_path / "alone.keras")
    expect(tmp_path / "alone.keras", "none at .*config.json")
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": "bytes"}))
    with pytest.raises(common.UserError, match="test"):
        evaluate.evaluate(str(tmp_path / "alone.keras"), books, "test")


def test_data_are_looked_for_where_the_training_read(
    books, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # the books are there, too
    config, folder = tiny_config(), str(tmp_path / "run")
    for given, found, named in ((None, None, "ours"), (".", books, books)):
        common.claim_folder(config, given, folder)
        assert common.evaluation_data_dir(None, folder, "ours") == found
        assert capsys.readouterr().out == f"data: {named}\n"
    common.claim_folder(config, "tfds:pg19", folder)
    assert common.evaluation_data_dir(None, folder, "", 0) == "tfds:pg19"
    assert common.evaluation_data_dir("here", folder, "", 0) == "here"
    common.claim_folder(config, "gone", folder)
    with pytest.raises(common.UserError, match="--data_dir.*gone of the tra"):
        common.evaluation_data_dir(None, folder, "")


def test_evaluate_needs_a_model_and_a_known_split():
    flag_values = flags.FlagValues()
    evaluate.define_flags(flag_values)
    with pytest.raises(flags.IllegalFlagValueError, match="model"):
        flag_values(["evaluate"])
    with pytest.raises(flags.IllegalFlagValueError, match="holdout"):
        flag_values(["evaluate", "--model=m", "--split=holdout"])
