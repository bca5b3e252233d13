r"""Turns a data set of the examples into TFRecord files.

    python -m tools.prepare_data --task=pg19 --source=DIR --output_dir=OUT
    python -m tools.prepare_data --task=imagenet64 \
        --source=tfds:imagenet_resized/64x64 --output_dir=OUT

`--source` is whatever the example takes as `--data_dir`, and the example then
takes `OUT`. Of each split it writes `<split>-00000-of-00004.tfrecord` and so
on, and at last `SHA256SUMS`, for `sha256sum -c`. A run that was cut off goes
on at the file where it stopped when the same command is given again; one that
is complete is checked.
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
        folder: existing folder of the files.
        task: one of `TASKS`.
        source: string, as `--data_dir` of the task's example.
        file_bytes: int; a file is ended once it holds so many.

    Raises:
        examples.common.UserError: the folder holds another source's files.
    """

    def __init__(self, folder, task, source, file_bytes):
        self.folder = folder
        self.source = source
        self.data = importlib.import_module(f"examples.{task}.data")
        self.file_bytes = file_bytes
        self._path = os.path.join(folder, _PROGRESS)
        given = {"task": task, "source": source, "file_bytes": file_bytes}
        self._done = {"given": given, "splits": {}}
        if os.path.exists(self._path):
            with open(self._path, encoding="utf-8") as file:
                self._done = json.load(file)
            if self._done["given"] != given:
                raise common.UserError(
                    f"--output_dir: {folder} holds files of "
                    f"{self._done['given']}. Received: {given}"
                )

    def write(self, split):
        """Writes what is missing of a split.

        Returns:
            int, examples of the split.
        """
        parts = self._done["splits"].setdefault(
            split, {"parts": [], "whole": False}
        )
        if not parts["whole"]:
            self._write_parts(split, parts)
        return sum(part["examples"] for part in parts["parts"])

    def _write_parts(self, split, parts):
        written = sum(part["examples"] for part in parts["parts"])
        for old in glob.glob(f"{split}-*-of-*.tfrecord", root_dir=self.folder):
            # Of a preparation whose progress is gone; those of
            # this one are known before they get their names.
            if not any(part.get("file") == old for part in parts["parts"]):
                os.remove(os.path.join(self.folder, old))
        examples = self.data.raw_examples(self.source, split)
        # How many there are is known at the end only.
        bar = keras.utils.Progbar(None, unit_name=f"{split} example")
        for _ in itertools.islice(examples, written):
            bar.add(1)
        while True:
            path = self._part(split, len(parts["parts"]))
            part = self._write_part(path, examples, bar)
            if not part["examples"]:
                os.remove(path)
                break
            parts["parts"].append(part)
            self._save()
        count = len(parts["parts"])
        for index, part in enumerate(parts["parts"]):
            part["file"] = f"{split}-{index:05d}-of-{count:05d}.tfrecord"
        self._save()
        for index, part in enumerate(parts["parts"]):
            old = self._part(split, index)
            if os.path.exists(old):  # not renamed before the last run ended
                os.replace(old, os.path.join(self.folder, part["file"]))
        parts["whole"] = True
        self._save()
        total = sum(part["examples"] for part in parts["parts"])
        bar.update(total, finalize=True)

    def _write_part(self, path, examples, bar):
        """Writes one file; returns its number of examples and checksum."""
        count = size = 0
        with tf.io.TFRecordWriter(path) as file:
            for name, data in examples:
                record = records.serialize(name, data)
                file.write(record)
                count += 1
                size += len(record)
                bar.add(1)
                if size >= self.file_bytes:
                    break
        return {"examples": count, "sha256": checksum(path)}

    def _part(self, split, index):
        return os.path.join(self.folder, f"{split}-{index:05d}.unfinished")

    def _save(self):
        with open(self._path + ".new", "w", encoding="utf-8") as file:
            json.dump(self._done, file, indent=1)
        os.replace(self._path + ".new", self._path)

    def finish(self):
        """Checks every file of whole splits and writes `SHA256SUMS`.

        Raises:
            examples.common.UserError: a file is missing or was changed.
        """
        lines = []
        splits = self._done["splits"].values()
        for split in [split for split in splits if split["whole"]]:
            for part in split["parts"]:
                path = os.path.join(self.folder, part["file"])
                if not os.path.exists(path) or (
                    checksum(path) != part["sha256"]
                ):
                    raise common.UserError(
                        f"{path} is missing or damaged. Delete "
                        f"{self._path} to write all files anew."
                    )
                lines.append(f"{part['sha256']}  {part['file']}\n")
        with open(
            os.path.join(self.folder, SUMS), "w", encoding="utf-8"
        ) as file:
            file.writelines(lines)


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
        "Which splits; none: all of the example.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "file_megabytes",
        128,
        "A file is ended once it holds so many.",
        lower_bound=1,
        flag_values=flag_values,
    )


def main(options=flags.FLAGS):
    """Runs the command.

    Returns:
        Dict of splits to their numbers of examples.
    """
    folder = options.output_dir
    os.makedirs(folder, exist_ok=True)
    writer = Writer(
        folder, options.task, options.source, options.file_megabytes * 10**6
    )
    splits = options.splits or writer.data.SPLITS
    unknown = sorted(set(splits) - set(writer.data.SPLITS))
    if unknown:
        raise common.UserError(
            f"--splits expects some of {writer.data.SPLITS}. Received: "
            f"{unknown}"
        )
    counts = {split: writer.write(split) for split in splits}
    writer.finish()
    # Titles of books, for one: the example reads them there.
    for name in getattr(writer.data, "SIDE_FILES", ()):
        beside = os.path.join(options.source, name)
        if os.path.exists(beside):
            shutil.copyfile(beside, os.path.join(folder, name))
    for split, count in counts.items():
        print(f"{split:<12}{count:>12,} examples")
    print(f"checked: {os.path.join(folder, SUMS)}")
    return counts


if __name__ == "__main__":
    define_flags()
    common.run(main)
