"""TFRecord files of the examples, and the tool that writes them."""

import hashlib
import importlib
import os
import subprocess
import sys
import types

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


@pytest.mark.parametrize(
    "name, content, place",
    [
        (b"caf\xe9", b"", "name: .*0xe9 at offset 3"),
        (b"b", b"\xff text", "b: .*0xff at offset 0"),
    ],
)
def test_what_is_not_utf_8_is_named(tmp_path, name, content, place):
    example = tf.train.Example.FromString(records.serialize("", content))
    example.features.feature["name"].bytes_list.value[0] = name
    path = str(tmp_path / "train-00000-of-00001.tfrecord")
    with tf.io.TFRecordWriter(path) as file:
        file.write(records.serialize("a", b"text"))
        file.write(example.SerializeToString())
    with pytest.raises(
        common.UserError, match=f"train-00000.*, record 2, {place}"
    ):
        list(records.read([path], text=True))
    if name == b"b":  # an image, for one
        assert list(records.read([path]))[1] == ("b", content)


def test_the_splits_of_a_tensorflow_dataset(monkeypatch):
    prepared = {}
    module = types.SimpleNamespace(
        builder=lambda name: types.SimpleNamespace(
            download_and_prepare=lambda: prepared.update({name: None}),
            info=types.SimpleNamespace(splits=prepared),
        )
    )
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    assert records.tensorflow_splits("tfds:mine") == {"mine"}
    del module.builder
    with pytest.raises(common.UserError, match="tfds:mine: AttributeError"):
        records.tensorflow_splits("tfds:mine")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(common.UserError, match=r"keras-performer\[tfds\]"):
        records.tensorflow_splits("tfds:mine")


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
def test_a_run_that_was_killed_goes_on(tmp_path, killed_at):
    source = books(tmp_path / "in")
    prepare(source, tmp_path / "whole")
    out = tmp_path / "out"
    prepare_killed(source, out, killed_at)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert not list(out.glob("*.tfrecord"))
    prepare(source, out)
    assert snapshot(out) == snapshot(tmp_path / "whole")
    # What was whole was not written again.
    for index in range(killed_at // 3):
        path = out / f"train-0000{index}-of-00003.tfrecord"
        assert path.stat().st_mtime_ns == before[
            f"train-0000{index}.unfinished"
        ]


def prepare_killed(source, out, killed_at, *arguments):
    """Ends as a killed process does, at an example of each split."""
    read = data.raw_examples

    def killed(*arguments):
        for index, example in enumerate(read(*arguments)):
            if index == killed_at:
                raise KeyboardInterrupt
            yield example

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "raw_examples", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out, *arguments)


def damage(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("splits", [(), ("--splits=test",)])
def test_what_is_missing_or_damaged_is_written_anew(tmp_path, splits):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, out)
    before = snapshot(out)
    damage(out / "train-00001-of-00003.tfrecord")
    (out / "test-00000-of-00001.tfrecord").unlink()
    whole = out / "train-00002-of-00003.tfrecord"
    time = whole.stat().st_mtime_ns
    # A damaged file is never listed as checked, whatever was asked for.
    counts = prepare(source, out, *splits)
    assert counts["test"] == 1 and ("train" in counts) == (not splits)
    assert snapshot(out) == before
    assert whole.stat().st_mtime_ns == time


def test_an_unfinished_file_that_is_damaged_is_written_anew(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, tmp_path / "whole")
    prepare_killed(source, out, 7)
    damage(out / "train-00000.unfinished")
    (out / "train-00001.unfinished").unlink()
    prepare(source, out)
    assert snapshot(out) == snapshot(tmp_path / "whole")


def test_a_whole_split_gets_its_names_after_a_kill(tmp_path, monkeypatch):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, tmp_path / "whole")
    replace, calls = os.replace, []

    def killed(old, new):
        if str(new).endswith(".tfrecord"):
            calls.append(new)
            if len(calls) == 2:
                raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(source, out)
    assert len(list(out.glob("*.tfrecord"))) == 1
    prepare(source, out)
    assert snapshot(out) == snapshot(tmp_path / "whole")


def rename_first(folder):
    (folder / "0.txt").rename(folder / "00.txt")


def change_first(folder):
    (folder / "0.txt").write_text("other text")


def add_first(folder):
    (folder / ".first.txt").write_text("more text")


def remove_most(folder):
    for name in "12345678":
        (folder / f"{name}.txt").unlink()


@pytest.mark.parametrize(
    "change", [rename_first, change_first, add_first, remove_most]
)
@pytest.mark.parametrize("state", ["killed", "damaged"])
def test_a_source_that_was_changed_is_refused(tmp_path, change, state):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    if state == "killed":
        prepare_killed(source, out, 7)
    else:
        prepare(source, out)
        damage(out / "train-00000-of-00003.tfrecord")
    change(tmp_path / "in" / "train")
    progress = (out / "progress.json").read_text()
    with pytest.raises(
        common.UserError, match="--source: expected the . examples .*'train'"
    ):
        prepare(source, out)
    assert (out / "progress.json").read_text() == progress
    # What the message says.
    (out / "progress.json").unlink()
    prepare(source, out)
    assert list(data.raw_examples(str(out), "train")) == list(
        data.raw_examples(source, "train")
    )


def test_a_damaged_file_is_not_mended_from_a_longer_source(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, out)
    damage(out / "train-00000-of-00003.tfrecord")
    (tmp_path / "in" / "train" / "more.txt").write_text("more text")
    with pytest.raises(common.UserError, match="expected the 9 examples"):
        prepare(source, out)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"given": {}, "splits": {"train": {"parts": []}}}',
     '{"given": {}, "splits": {"train": {"parts": [{}], "whole": true}}}'],
)
def test_a_damaged_progress_file_is_named(tmp_path, content):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare(source, out)
    before = snapshot(out)
    (out / "progress.json").write_text(content)
    with pytest.raises(common.UserError, match=r"progress\.json is damaged"):
        prepare(source, out)
    # What the message says.
    (out / "progress.json").unlink()
    prepare(source, out)
    assert snapshot(out) == before


def test_a_split_of_another_run_may_be_unfinished(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    prepare_killed(source, out, 4, "--splits=train")
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
    # Only by files that are whole.
    before = snapshot(out)
    prepare_killed(source, out, 7)
    assert before.items() <= snapshot(out).items()
    (out / "progress.json").unlink()
    prepare(source, out, "--file_megabytes=2")
    assert len(records.files(str(out), "train")) == 2
    assert not list(out.glob("*.unfinished"))


@pytest.mark.parametrize("source", ["absent", "empty", "other"])
def test_a_wrong_source_removes_nothing(tmp_path, source):
    out = tmp_path / "out"
    prepare(books(tmp_path / "in"), out)
    (out / "progress.json").unlink()
    before = snapshot(out)
    for split in data.SPLITS:
        (tmp_path / "empty" / split).mkdir(parents=True)
    (tmp_path / "other").mkdir()
    with pytest.raises(common.UserError, match=f"--source: .*{source}"):
        prepare(str(tmp_path / source), out)
    assert snapshot(out) == before


def test_a_source_is_not_its_own_output(tmp_path):
    folder = tmp_path / "in"
    source = books(folder)
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, folder / "train" / "..", tmp_path / "link"):
        with pytest.raises(common.UserError, match="--output_dir: expected"):
            prepare(source, out)
    assert not (folder / "progress.json").exists()


def test_splits_that_a_source_lacks_are_skipped(tmp_path, capsys):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    (tmp_path / "in" / "test" / "2.txt").unlink()
    (tmp_path / "in" / "test").rmdir()
    (tmp_path / "in" / "testimonials.md").write_text("no split")
    for _ in range(2):
        assert prepare(source, out) == {"train": 9, "validation": 1}
        assert f"skipped, {source} has no" in capsys.readouterr().out
        assert (out / "SHA256SUMS").read_text().count("\n") == 4
    # One that is named, or was there before, is no longer skipped.
    absent = tmp_path / "absent"
    with pytest.raises(
        common.UserError, match="--source: .* no split 'test'.*--splits"
    ):
        prepare(source, absent, "--splits=train,test")
    assert not absent.exists()
    (out / "validation-00000-of-00001.tfrecord").unlink()
    (tmp_path / "in" / "validation").rename(tmp_path / "validation")
    with pytest.raises(common.UserError, match="no split 'validation'"):
        prepare(source, out)


def test_a_source_without_any_split_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(
        common.UserError, match="--source: .* none of .*validation, test"
    ):
        prepare(str(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_split_that_cannot_be_read_is_told_before_any_is_written(tmp_path):
    source, out = books(tmp_path / "in"), tmp_path / "out"
    (tmp_path / "in" / "test" / "2.txt").unlink()
    with pytest.raises(common.UserError, match="--source: there is no text"):
        prepare(source, out)
    assert not list(out.iterdir())
    (tmp_path / "records").mkdir()
    write(tmp_path / "records", "train", [])
    with pytest.raises(common.UserError, match="--source: .*'train' .*empty"):
        prepare(str(tmp_path / "records"), out, task="protein")


def test_a_tensorflow_dataset_may_lack_splits(tmp_path, monkeypatch):
    builder = types.SimpleNamespace(
        download_and_prepare=lambda: None,
        info=types.SimpleNamespace(splits={"train": None}),
    )
    module = types.SimpleNamespace(
        builder=lambda name: builder,
        load=lambda name, split, data_dir: [{"sequence": b"MKV"}],
        as_numpy=lambda dataset: dataset,
    )
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    counts = prepare("tfds:mine", tmp_path / "out", task="protein")
    assert counts == {"train": 1}


def test_one_file_is_of_one_split(tmp_path):
    source, out = tmp_path / "one.fasta", tmp_path / "out"
    source.write_text(">a\nMKV\n")
    for splits in ((), ("--splits=train,test",)):
        with pytest.raises(
            common.UserError, match="--splits: .* one split, .*one.fasta"
        ):
            prepare(source, out, *splits, task="protein")
    assert not out.exists()
    counts = prepare(source, out, "--splits=test", task="protein")
    assert counts == {"test": 1}


def test_names_that_are_not_utf_8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    images(tmp_path / "images")
    books(tmp_path / "pg19")
    for task, file in (("images", "0.png"), ("pg19", "0.txt")):
        path = tmp_path / task / "train" / file
        path.rename(path.with_stem(name))
    for task, source in (("imagenet64", "images"), ("pg19", "pg19")):
        out = str(tmp_path / f"{task} out")
        prepare(str(tmp_path / source), out, task=task)
        names = [n for n, _ in records.read(records.files(out, "train"))]
        assert any(name.startswith("caf\\xe9") for name in names)
    (tmp_path / "pg19").rename(tmp_path / name)
    source, out = str(tmp_path / name), str(tmp_path / "out")
    for arguments in ((source, out), (out, source)):
        with pytest.raises(common.UserError, match=r"--.*UTF-8.*caf.udce9"):
            prepare(*arguments)


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
    tokenizer = data.WordPieceTokenizer.read(str(path), 40)
    assert f"{tokenizer.vocabulary_size} pieces" in capsys.readouterr().out
    ids = tokenizer.tokenize(["1 text 2 text"])[0]
    assert tokenizer.unknown_id not in ids.numpy()
    assert tokenizer.detokenize(ids.numpy()) == "1 text 2 text"


@pytest.mark.parametrize(
    "output, data_dir, expected",
    [
        ("v.txt", "absent", "--data_dir: .*absent"),
        ("absent/v.txt", "in", "--output: cannot write .*absent/v.txt"),
        ("in", "in", "--output: expected a file"),
    ],
)
def test_a_vocabulary_that_fails_leaves_nothing(
    tmp_path, output, data_dir, expected
):
    books(tmp_path / "in")
    values = flags.FlagValues()
    build_vocabulary.define_flags(values)
    values(
        ["build_vocabulary", f"--data_dir={tmp_path / data_dir}",
         f"--output={tmp_path / output}"]
    )
    with pytest.raises(common.UserError, match=expected):
        build_vocabulary.main(values)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
