"""TFRecord files of the examples, and the tool that writes them."""

import hashlib
import importlib
import subprocess

import numpy as np
import pytest
from PIL import Image

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("tensorflow_text", reason="the examples tokenise by it")

from absl import flags

from examples import common
from examples import records
from examples.pg19 import data
from tools import build_vocabulary
from tools import prepare_data

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")


def write(folder, split, *parts, count=None):
    paths = []
    for index, part in enumerate(parts):
        of = len(parts) if count is None else count
        path = folder / f"{split}-{index:05d}-of-{of:05d}.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as file:
            for name, content in part:
                file.write(records.serialize(name, content))
        paths.append(str(path))
    return paths


def test_records_keep_names_and_any_bytes(tmp_path):
    given = [("caf\u00e9", bytes(range(256))), ("", b"")]
    paths = write(tmp_path, "train", given[:1], given[1:])
    write(tmp_path, "test", given)
    (tmp_path / "train-notes.txt").write_text("no records")
    assert records.files(str(tmp_path), "train") == paths
    assert list(records.read(paths)) == given
    assert records.files(str(tmp_path), "validation") == []
    assert records.files(str(tmp_path / "absent"), "train") == []


def test_a_missing_file_of_several_is_named(tmp_path):
    write(tmp_path, "train", [("a", b"x")], count=3)
    with pytest.raises(common.UserError, match="of 3 files .* 1, 2 is missing"):
        records.files(str(tmp_path), "train")


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_named(tmp_path, damage):
    (path,) = write(tmp_path, "train", [("a", b"x" * 100)])
    with open(path, "rb") as file:
        content = file.read()
    if damage == "cut":
        content = content[:-10]
    else:
        with tf.io.TFRecordWriter(path) as file:
            file.write(b"no example")
        with open(path, "rb") as file:
            content = file.read()
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(common.UserError, match="train-00000.* is damaged"):
        list(records.read([path]))


# --- tools.prepare_data ------------------------------------------------------

TEXTS = {str(index): f"{index} text " * 50_000 for index in range(9)}


def books(folder):
    for split, names in (("train", TEXTS), ("validation", "1"), ("test", "2")):
        (folder / split).mkdir(parents=True)
        for name in names:
            (folder / split / f"{name}.txt").write_text(TEXTS[name])
    (folder / "metadata.csv").write_text("1,One,1815,url\n")
    return str(folder)


def prepare(source, folder, *arguments, task="pg19"):
    values = flags.FlagValues()
    prepare_data.define_flags(values)
    values(
        ["prepare_data", f"--task={task}", f"--source={source}",
         f"--output_dir={folder}", "--file_megabytes=1", *arguments]
    )
    return prepare_data.main(values)


def snapshot(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
    }


def test_a_source_becomes_files_that_the_example_reads(tmp_path, capsys):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    counts = prepare(source, out)
    assert counts == {"train": 9, "validation": 1, "test": 1}
    names = sorted(path.name for path in out.glob("*.tfrecord"))
    # 400 kB each: a file is ended by the third.
    assert names == [
        "test-00000-of-00001.tfrecord",
        *(f"train-0000{i}-of-00003.tfrecord" for i in range(3)),
        "validation-00000-of-00001.tfrecord",
    ]
    subprocess.run(
        ["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=out, check=True
    )
    assert "train                  9 examples" in capsys.readouterr().out
    expected = data.load(source, "train")
    found = data.load(str(out), "train")
    assert [b.name for b in found] == [b.name for b in expected]
    assert found[1].title == "One"
    assert list(data.raw_examples(str(out), "train")) == list(
        data.raw_examples(source, "train")
    )


@pytest.mark.parametrize("killed_at", [0, 1, 4, 7, 8])
def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch, killed_at):
    source = books(tmp_path / "in")
    prepare(source, tmp_path / "whole")
    read = data.raw_examples

    def killed(*arguments):
        for index, example in enumerate(read(*arguments)):
            if index == killed_at:
                raise KeyboardInterrupt
            yield example

    out = tmp_path / "out"
    monkeypatch.setattr(data, "raw_examples", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert not list(out.glob("*.tfrecord"))
    monkeypatch.setattr(data, "raw_examples", read)
    prepare(source, out)
    assert snapshot(out) == snapshot(tmp_path / "whole")
    # What was whole was not written again.
    for index in range(killed_at // 3):
        path = out / f"train-0000{index}-of-00003.tfrecord"
        assert path.stat().st_mtime_ns == before[
            f"train-0000{index}.unfinished"
        ]


def test_a_file_that_was_changed_is_told(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, out)
    prepare(source, out)  # checks
    path = out / "train-00001-of-00003.tfrecord"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(common.UserError, match="train-00001.* is missing or"):
        prepare(source, out)


def test_a_split_of_another_run_may_be_unfinished(tmp_path, monkeypatch):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    read = data.raw_examples

    def killed(*arguments):
        for index, example in enumerate(read(*arguments)):
            if index == 4:
                raise KeyboardInterrupt
            yield example

    with monkeypatch.context() as patch:
        patch.setattr(data, "raw_examples", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, "--splits=train")
    assert prepare(source, out, "--splits=test") == {"test": 1}
    assert (out / "SHA256SUMS").read_text().count("\n") == 1
    assert prepare(source, out)["train"] == 9
    assert (out / "SHA256SUMS").read_text().count("\n") == 5


def test_files_of_an_earlier_preparation_are_replaced(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, out)
    (out / "progress.json").unlink()
    with pytest.raises(common.UserError, match="both of 3 and of 4. Delete"):
        (out / "train-00000-of-00004.tfrecord").touch()
        records.files(str(out), "train")
    prepare(source, out, "--file_megabytes=2")
    assert len(records.files(str(out), "train")) == 2


def test_other_settings_and_splits_are_refused(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    with pytest.raises(common.UserError, match=r"--splits .*\['dev'\]"):
        prepare(source, out, "--splits=train,dev")
    prepare(source, out, "--splits=test")
    with pytest.raises(common.UserError, match="holds files of .*Received"):
        prepare(str(tmp_path), out)


def images(folder):
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        for index in range(3):
            data = np.full((64, 64, 3), 40 * index, "uint8")
            image = Image.fromarray(data)
            image.save(folder / split / f"{index}.png")


def proteins(folder):
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.fasta").write_text(">a\nMKV\n>b\nWW\nAC\n")


@pytest.mark.parametrize(
    "task, write_source", [("imagenet64", images), ("protein", proteins)]
)
def test_the_other_examples_are_prepared(task, write_source, tmp_path):
    source, out = str(tmp_path / "in"), tmp_path / "out"
    write_source(tmp_path / "in")
    counts = prepare(source, out, task=task)
    examples = importlib.import_module(f"examples.{task}.data")
    assert set(counts) == set(examples.SPLITS)
    for split, count in counts.items():
        expected = list(examples.raw_examples(source, split))
        assert list(examples.raw_examples(str(out), split)) == expected
        assert len(expected) == count > 1


def test_a_vocabulary_is_built_and_read(tmp_path, capsys):
    source, path = books(tmp_path / "in"), tmp_path / "vocabulary.txt"
    values = flags.FlagValues()
    build_vocabulary.define_flags(values)
    values(
        ["build_vocabulary", f"--data_dir={source}", f"--output={path}",
         "--vocabulary_size=40", "--megabytes=1"]
    )
    build_vocabulary.main(values)
    values["output"].value = str(tmp_path / "absent" / "v.txt")
    with pytest.raises(common.UserError, match="--output: .*absent"):
        build_vocabulary.main(values)
    tokenizer = data.WordPieceTokenizer.read(str(path), 40)
    assert f"{tokenizer.vocabulary_size} pieces" in capsys.readouterr().out
    ids = tokenizer.tokenize(["1 text 2 text"])[0]
    assert tokenizer.unknown_id not in ids.numpy()
    assert tokenizer.detokenize(ids.numpy()) == "1 text 2 text"
