"""Examples as TFRecord files, and the TensorFlow Datasets behind them.

A record holds two strings of bytes: `name`, and `data`, which is a text in
UTF-8, the `64 * 64 * 3` bytes of an image in raster order, or the letters of
a protein. `python -m tools.prepare_data` writes such files.
"""

import contextlib
import os
import re

import tensorflow as tf

from examples.errors import UserError

FEATURES = {
    "name": tf.io.FixedLenFeature((), tf.string),
    "data": tf.io.FixedLenFeature((), tf.string),
}
_NAME = re.compile(r"(\w+)-(\d{5})-of-(\d{5})\.tfrecord")
TFDS = "tfds:"


def files(folder, split):
    """Paths of a split's files, in their order; empty if there are none.

    Raises:
        examples.common.UserError: some of the split's files are missing, or
            there are those of two preparations.
    """
    if not os.path.isdir(folder):
        return []
    matches = [_NAME.fullmatch(name) for name in sorted(os.listdir(folder))]
    matches = [match for match in matches if match and match[1] == split]
    counts = sorted({int(match[3]) for match in matches})
    if len(counts) > 1:
        raise UserError(
            f"{folder}: there are files of the split {split!r} both of "
            f"{' and of '.join(map(str, counts))}. Delete the older ones."
        )
    count = counts[0] if counts else 0
    found = {
        int(match[2]): os.path.join(folder, match[0]) for match in matches
    }
    missing = sorted(set(range(count)) - set(found))
    if missing:
        raise UserError(
            f"{folder}: of {count} files of the split {split!r}, number "
            f"{', '.join(map(str, missing))} is missing. The command of "
            "tools.prepare_data that made them writes it anew."
        )
    return [found[index] for index in sorted(found)]


def serialize(name, data):
    """A record: bytes, the same in every process."""
    features = {
        key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        for key, value in (("name", name.encode("utf-8")), ("data", data))
    }
    return tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString(deterministic=True)


def dataset(paths):
    """Dataset of dicts of two strings, `name` and `data`."""
    return tf.data.TFRecordDataset(paths).map(
        lambda record: tf.io.parse_single_example(record, FEATURES)
    )


def read(paths, text=False):
    """Yields `(name, data)`: a string and bytes.

    Args:
        paths: list of strings.
        text: whether `data` must be UTF-8.

    Raises:
        examples.common.UserError: a file is damaged, or holds other records.
    """
    for path in paths:
        found = dataset([path]).as_numpy_iterator()
        try:
            for number, record in enumerate(found, start=1):
                place = f"{path}, record {number}"
                name = _decode(record["name"], f"{place}, name")
                if text:
                    _decode(record["data"], f"{place}, {name}")
                yield name, record["data"]
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as e:
            raise UserError(
                f"{path} is damaged, or no file of tools.prepare_data: "
                f"{e.message}"
            ) from None


def _decode(data, place):
    """Bytes -> string; `place` says in an error where they stand."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place}: expected UTF-8. Received: byte "
            f"{data[error.start]:#04x} at offset {error.start}"
        ) from None


def tensorflow_dataset(source, split, data_dir=None):
    """The TensorFlow Dataset that `tfds:NAME` names; imported here only.

    Args:
        source: string, such as "tfds:pg19".
        split: string, one of the data set's own.
        data_dir: folder where the data set lies, or None for TFDS's own.

    Returns:
        Iterable of dicts of numpy values.

    Raises:
        examples.common.UserError: the package or the data set is missing.
    """
    tfds = _import_tensorflow_datasets(source)
    return _read_tensorflow_dataset(tfds, source, split, data_dir)


def _read_tensorflow_dataset(tfds, source, split, data_dir):
    name = source.removeprefix(TFDS)
    with _naming(f"{source}, split {split!r}"):
        yield from tfds.as_numpy(
            tfds.load(name, split=split, data_dir=data_dir)
        )


def tensorflow_splits(source):
    """Names of the splits of a TensorFlow Dataset; prepares it if need be.

    Args:
        source: string, such as "tfds:pg19".

    Returns:
        Set of strings.

    Raises:
        examples.common.UserError: the package or the data set is missing.
    """
    tfds = _import_tensorflow_datasets(source)
    with _naming(source):
        builder = tfds.builder(source.removeprefix(TFDS))
        builder.download_and_prepare()  # before it, they may be unknown
        return set(builder.info.splits)


@contextlib.contextmanager
def _naming(what):
    """Makes any error a `UserError` about `what`: each builder has its own."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error


def _import_tensorflow_datasets(source):
    try:
        import tensorflow_datasets
    except ImportError:
        raise UserError(
            f"{source} needs TensorFlow Datasets: "
            'pip install "keras-performer[tfds]"'
        ) from None
    return tensorflow_datasets
