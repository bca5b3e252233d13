"""Learns a vocabulary of word pieces from books, for examples/pg19.

    python -m tools.build_vocabulary --data_dir=DIR --output=vocabulary.txt
    python -m examples.pg19.train --preset=paper --data_dir=DIR \\
        --vocabulary=vocabulary.txt

`DIR` is what the example takes as `--data_dir`; its training split is read.
"""

import os
import tempfile

from absl import flags

from examples import common
from examples.pg19 import data


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    flags.DEFINE_string(
        "data_dir",
        None,
        "Folder in PG-19's layout; none: Python's own documentation.",
        flag_values=flag_values,
    )
    flags.DEFINE_string(
        "output",
        None,
        "File to write, one piece a line.",
        flag_values=flag_values,
        required=True,
    )
    for name, default, least, text in (
        ("vocabulary_size", 32000, 3, "The most pieces."),
        ("megabytes", 20, 1, "Of text to count words in, by Python."),
    ):
        flags.DEFINE_integer(
            name, default, text, lower_bound=least, flag_values=flag_values
        )


def _check_output(path):
    """Raises a `UserError` where no file can be written; leaves nothing."""
    if os.path.isdir(path):
        raise common.UserError(
            f"--output: expected a file to write. Received: the folder {path}"
        )
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(path) or ".").close()
    except OSError as error:
        raise common.UserError(
            f"--output: cannot write {path}: {error.strerror}"
        ) from error


def main(options=flags.FLAGS):
    """Runs the command."""
    _check_output(options.output)  # now, and not after minutes
    documents = data.load(options.data_dir, "train")
    tokenizer = data.WordPieceTokenizer.learn(
        documents, options.vocabulary_size, options.megabytes * 10**6
    )
    tokenizer.write(options.output)
    print(f"{options.output}: {tokenizer.vocabulary_size:,} pieces")


if __name__ == "__main__":
    define_flags()
    common.run(main)
