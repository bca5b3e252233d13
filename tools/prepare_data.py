r"""Turns a data set of the examples into TFRecord files.

    python -m tools.prepare_data --task=pg19 --source=DIR --output_dir=OUT
    python -m tools.prepare_data --task=imagenet64 \
        --source=tfds:imagenet_resized/64x64 --output_dir=OUT

`--source` is whatever the example takes as `--data_dir`, and the example then
takes `OUT`. Of each split it writes `<split>-00000-of-00004.tfrecord` and so
on, and at last `SHA256SUMS`, for `sha256sum -c`. Earlier files of a split are
replaced once all new ones are written. Without `--splits` those that the
source lacks are skipped.

The same command given again goes on at the file where a run was cut off,
checks the files of a whole one, and writes anew what is missing or damaged.
"""

import glob
import hashlib
import importlib
import itertools
import json
import os
import shutil

import keras
import tensorflow as tf
from absl import flags

from examples import common
from examples import records

TASKS = ("pg19", "imagenet64", "protein")
SUMS = "SHA256SUMS"
_PROGRESS = "progress.json"


class Writer:
    """Writes the splits of one source, and knows what is written already.

    Args:
        folder: folder of the files; it exists when `write` is called.
        task: one of `TASKS`.
        source: string, as `--data_dir` of the task's example.
        file_bytes: int; a file is ended once it holds so many.

    Raises:
        examples.common.UserError: the folder holds another source's files,
            or `progress.json` in it is damaged.
    """

    def __init__(self, folder, task, source, file_bytes):
        self.folder = folder
        self.source = source
        self.file_bytes = file_bytes
        self._path = os.path.join(folder, _PROGRESS)
        given = {"task": task, "source": source, "file_bytes": file_bytes}
        # A split is whole once all its parts are written; then each of them
        # has its last name or is about to get it.
        self._done = {"given": given, "splits": {}}
        if os.path.exists(self._path):
            self._done = _read_progress(self._path)
            if self._done["given"] != given:
                raise common.UserError(
                    f"--output_dir: {folder} holds files of "
                    f"{self._done['given']}. Received: {given}"
                )

    def has_begun(self, split):
        """Whether files of a split are written."""
        return split in self._done["splits"]

    def unwritten(self, splits):
        """Those of some splits that are not whole, and all that are damaged.

        Args:
            splits: sequence of strings.

        Returns:
            List of strings.
        """
        found = [
            split
            for split in splits
            if not self._done["splits"].get(split, {"whole": False})["whole"]
        ]
        for split, entry in self._done["splits"].items():
            if entry["whole"]:
                places = [
                    self._find(split, index)
                    for index in range(len(entry["parts"]))
                ]
                if None in places:
                    found.append(split)
                else:  # in case the last run ended before it
                    self._rename(split, places)
        return found

    def count(self, split):
        """Int, the examples of a split that are written."""
        parts = self._done["splits"][split]["parts"]
        return sum(part["examples"] for part in parts)

    def write(self, split, examples):
        """Writes what is missing of a split.

        Args:
            split: string.
            examples: iterator of `(name, data)`: all examples of the split.

        Raises:
            examples.common.UserError: they are not those of before.
        """
        entry = self._done["splits"].setdefault(
            split, {"parts": [], "whole": False}
        )
        parts = entry["parts"]
        # How many there are is known at the end only.
        bar = keras.utils.Progbar(None, unit_name=f"{split} example")
        places = [
            self._known_part(split, index, examples, bar)
            for index in range(len(parts))
        ]
        for first in examples:
            if entry["whole"]:
                raise self._changed(split)
            place = _unfinished(split, len(parts))
            rest = itertools.chain([first], examples)
            parts.append(self._write_part(place, rest, bar))
            places.append(place)
            self._save()
        entry["whole"] = True
        self._save()
        self._rename(split, places)
        bar.update(self.count(split), finalize=True)

    def _known_part(self, split, index, examples, bar):
        """Skips the examples of a file, or writes it anew; returns its name.

        Either way they must be what they were when it was first written.
        """
        part = self._done["splits"][split]["parts"][index]
        examples = itertools.islice(examples, part["examples"])
        place = self._find(split, index)
        if place is None:
            place = _unfinished(split, index)
            found = self._write_part(place, examples, bar)
        else:
            content = hashlib.sha256()
            for name, data in examples:
                content.update(records.serialize(name, data))
                bar.add(1)
            found = {**part, "content": content.hexdigest()}
        if found["content"] != part["content"]:
            raise self._changed(split)
        part.update(found)
        return place

    def _write_part(self, place, examples, bar):
        """Writes one file; returns what `progress.json` says of it."""
        path = os.path.join(self.folder, place)
        count = size = 0
        content = hashlib.sha256()
        with tf.io.TFRecordWriter(path) as file:
            for name, data in examples:
                record = records.serialize(name, data)
                file.write(record)
                content.update(record)
                count += 1
                size += len(record)
                bar.add(1)
                if size >= self.file_bytes:
                    break
        return {
            "examples": count,
            "content": content.hexdigest(),
            "sha256": checksum(path),
        }

    def _find(self, split, index):
        """Name under which a part lies undamaged; None: there is none."""
        entry = self._done["splits"][split]
        parts = entry["parts"]
        names = [_unfinished(split, index)]
        if entry["whole"]:
            names.append(_finished(split, index, len(parts)))
        for name in names:
            path = os.path.join(self.folder, name)
            if os.path.exists(path) and (
                checksum(path) == parts[index]["sha256"]
            ):
                return name
        return None

    def _rename(self, split, places):
        """Gives the parts of a whole split their last names."""
        names = [
            _finished(split, index, len(places))
            for index in range(len(places))
        ]
        if places == names:
            return
        # Those of earlier preparations go first: a folder that lacks files
        # is refused by the examples, one that mixes them may not be.
        for pattern in (f"{split}-*-of-*.tfrecord", f"{split}-*.unfinished"):
            for old in glob.glob(pattern, root_dir=self.folder):
                if old not in places:
                    os.remove(os.path.join(self.folder, old))
        for place, name in zip(places, names, strict=True):
            os.replace(
                os.path.join(self.folder, place),
                os.path.join(self.folder, name),
            )

    def _changed(self, split):
        return common.UserError(
            f"--source: expected the {self.count(split):,} examples of the "
            f"split {split!r} that {self.folder} was begun with, in their "
            f"order. Received: others in {self.source}. Delete {self._path} "
            "to write all files anew."
        )

    def _save(self):
        with open(self._path + ".new", "w", encoding="utf-8") as file:
            json.dump(self._done, file, indent=1)
        os.replace(self._path + ".new", self._path)

    def write_sums(self):
        """Writes `SHA256SUMS` of all whole splits."""
        lines = []
        for split, entry in self._done["splits"].items():
            parts = entry["parts"] if entry["whole"] else []
            for index, part in enumerate(parts):
                name = _finished(split, index, len(parts))
                lines.append(f"{part['sha256']}  {name}\n")
        with open(
            os.path.join(self.folder, SUMS), "w", encoding="utf-8"
        ) as file:
            file.writelines(lines)


def _unfinished(split, index):
    return f"{split}-{index:05d}.unfinished"


def _finished(split, index, count):
    return f"{split}-{index:05d}-of-{count:05d}.tfrecord"


def _read_progress(path):
    """What an earlier run has written; see `Writer`."""
    try:
        with open(path, encoding="utf-8") as file:
            done = json.load(file)
        entries = done["splits"].values()
        parts = [part for entry in entries for part in entry["parts"]]
        right = (
            "given" in done
            and all("whole" in entry for entry in entries)
            and all(
                part.keys() == {"examples", "content", "sha256"}
                for part in parts
            )
        )
    # Not JSON, or JSON of another shape.
    except (ValueError, KeyError, TypeError, AttributeError):
        right = False
    if not right:
        raise common.UserError(
            f"{path} is damaged, or of another version of tools.prepare_data. "
            "Delete it to write all files anew."
        )
    return done


def checksum(path):
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    flags.DEFINE_enum(
        "task", None, TASKS, "Example.", flag_values=flag_values, required=True
    )
    for name, text in (
        ("source", "What the example takes as --data_dir."),
        ("output_dir", "Folder of the files."),
    ):
        flags.DEFINE_string(
            name, None, text, flag_values=flag_values, required=True
        )
    flags.DEFINE_list(
        "splits",
        None,
        "Which splits; none: all that the source has.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "file_megabytes",
        128,
        "A file is ended once it holds so many.",
        lower_bound=1,
        flag_values=flag_values,
    )


def _check(options, known):
    """Refuses flags that make no sense, before anything is read or written.

    Args:
        options: the flags.
        known: tuple of strings, the splits of the example.
    """
    source, folder = options.source, options.output_dir
    for name, path in (("source", source), ("output_dir", folder)):
        # Python has surrogates for other bytes; TensorFlow takes none.
        if path.encode("utf-8", "ignore").decode("utf-8") != path:
            raise common.UserError(
                f"--{name}: expected a path in UTF-8. Received: {path!a}"
            )
    unknown = sorted(set(options.splits or ()) - set(known))
    if unknown:
        raise common.UserError(
            f"--splits expects some of {known}. Received: {unknown}"
        )
    if os.path.realpath(source) == os.path.realpath(folder):
        raise common.UserError(
            "--output_dir: expected another folder than --source. Received: "
            f"{folder}"
        )
    if os.path.isfile(source) and len(set(options.splits or ())) != 1:
        raise common.UserError(
            f"--splits: expected one split, as --source={source} is one "
            f"file. Received: {', '.join(options.splits or ()) or 'none'}"
        )


def _has_split(source, split):
    """Whether anything in a source bears the name of a split."""
    if source.startswith(records.TFDS):
        return split in records.tensorflow_splits(source)
    if os.path.isfile(source):
        return True
    if not os.path.isdir(source):
        raise common.UserError(
            f"--source: there is no file or folder {source}"
        )
    # val_data.npz is of the split "validation".
    begins = [split + mark for mark in "-_."] + ["val_"] * (
        split == "validation"
    )
    return any(
        name == split or name.startswith(tuple(begins))
        for name in os.listdir(source)
    )


def _open(data, source, split):
    """Iterator over a split, of which the first example is read already."""

    def read():
        try:
            yield from data.raw_examples(source, split)
        except common.UserError as error:
            message = str(error).replace("--data_dir", "--source")
            raise common.UserError(message) from error

    examples = read()
    for first in examples:
        return itertools.chain([first], examples)
    raise common.UserError(
        f"--source: the split {split!r} of {source} is empty."
    )


def main(options=flags.FLAGS):
    """Runs the command.

    Returns:
        Dict of splits to their numbers of examples.
    """
    source, folder = options.source, options.output_dir
    data = importlib.import_module(f"examples.{options.task}.data")
    _check(options, data.SPLITS)
    writer = Writer(
        folder, options.task, source, options.file_megabytes * 10**6
    )
    splits = options.splits or data.SPLITS
    unwritten = writer.unwritten(splits)
    lacking = [split for split in unwritten if not _has_split(source, split)]
    for split in lacking:
        if options.splits or writer.has_begun(split):
            raise common.UserError(
                f"--source: {source} has no split {split!r}. Name by "
                "--splits those that it has."
            )
    if len(lacking) == len(splits):
        raise common.UserError(
            f"--source: {source} has none of the splits {', '.join(splits)}."
        )
    os.makedirs(folder, exist_ok=True)
    # All of them before one is written, which may take hours.
    opened = {
        split: _open(data, source, split)
        for split in unwritten
        if split not in lacking
    }
    for split in list(opened):
        writer.write(split, opened.pop(split))
    writer.write_sums()
    # Titles of books, for one: the example reads them there.
    for name in getattr(data, "SIDE_FILES", ()):
        beside = os.path.join(source, name)
        if os.path.exists(beside):
            shutil.copyfile(beside, os.path.join(folder, name))
    for split in lacking:
        print(f"{split:<12}{'skipped':>12}, {source} has no such split")
    counts = {
        split: writer.count(split) for split in splits if split not in lacking
    }
    for split, count in counts.items():
        print(f"{split:<12}{count:>12,} examples")
    print(f"checked: {os.path.join(folder, SUMS)}")
    return counts


if __name__ == "__main__":
    define_flags()
    common.run(main)
