"""Images as sequences of sub-pixels, read inside tf.data.

An image is its red, green and blue values in raster order, row by row and
pixel by pixel: ids from 0 to 255. A sequence is a pair (x, y) of such ids
`[L]`, int32. y holds the image and x the same one place later, after a 0:
`x[0] == 0` and `x[t + 1] == y[t]`. The first input is always this 0, so the
start needs no id of its own.
"""

import importlib.util
import os
import re
import struct
import zipfile

import numpy as np
import tensorflow as tf
from PIL import Image
from PIL import ImageOps

from examples import common
from examples import records

SPLITS = ("train", "validation")
# What all sources hold; smaller images are made of these.
SIZE = 64
BYTES = SIZE * SIZE * 3

_BATCH = re.compile(r"train_data_batch_(\d+)\.npz")
# In the public domain, or CC0; see README.md.
PHOTOGRAPHS = {
    "train": (
        "astronaut.png",
        "coffee.png",
        "hubble_deep_field.jpg",
        "retina.jpg",
        "rocket.jpg",
    ),
    "validation": ("chelsea.png",),
}
LAYOUTS = (
    "train_data_batch_1.npz, ... and val_data.npz, or folders train and "
    "validation of images, or files <split>-00000-of-00004.tfrecord"
)


class Split:
    """Images in parts, of which one at a time is in memory.

    Args:
        sizes: list of int, the images of each part.
        read: function of a part's number, an int64 scalar tensor, that gives
            its images, uint8 `[n, BYTES]`. It works in graph mode.
        name: function of two integers, a part's number and a place in it,
            that gives the image's name.
        channels_first: whether the bytes of an image are three planes.
    """

    def __init__(self, sizes, read, name, channels_first=False):
        self.sizes = sizes
        self.read = read
        self.name = name
        self.channels_first = channels_first

    @property
    def num_images(self):
        """Int, the images of all parts."""
        return sum(self.sizes)

    def images(self, data, size=SIZE):
        """Bytes of `read`, uint8 `[B, BYTES]` -> `[B, size, size, 3]`.

        A pixel of a smaller image is the rounded mean of those it replaces.
        """
        if self.channels_first:
            data = tf.reshape(data, [-1, 3, SIZE, SIZE])
            data = tf.transpose(data, [0, 2, 3, 1])
        if size == SIZE:
            return tf.reshape(data, [-1, SIZE, SIZE, 3])
        factor = SIZE // size
        data = tf.reshape(data, [-1, size, factor, size, factor, 3])
        mean = tf.reduce_mean(tf.cast(data, tf.float32), axis=[2, 4])
        return tf.cast(tf.round(mean), tf.uint8)


def load(data_dir, split):
    """The images of one split.

    Args:
        data_dir: folder in one of `LAYOUTS`, "tfds:NAME" with a TensorFlow
            Dataset of 64x64 images, or None: crops of photographs that
            scikit-image brings along.
        split: "train" or "validation".

    Returns:
        A `Split`.

    Raises:
        examples.common.UserError: the folder or the split is missing or
            empty, or a file is damaged or of another kind.
    """
    if data_dir is None:
        return _photographs(split)
    if data_dir.startswith(records.TFDS):
        return _tensorflow_dataset(data_dir, split)
    if not os.path.isdir(data_dir):
        raise common.UserError(f"--data_dir: there is no folder {data_dir}")
    record_files, npz, folder = _sources(data_dir, split)
    if record_files:
        return _tfrecords(record_files)
    if npz:
        return read_npz(npz)
    return read_folder(folder)


def _sources(data_dir, split):
    """Record files, npz files and a folder of a split: one of them is there.

    Raises:
        examples.common.UserError: none is there, or more than one.
    """
    record_files = records.files(data_dir, split)
    npz = _npz_paths(data_dir, split)
    folder = os.path.join(data_dir, split)
    folder = folder if os.path.isdir(folder) else None
    count = bool(record_files) + bool(npz) + bool(folder)
    if count != 1:
        state = "no split" if count == 0 else "more than one form of the split"
        raise common.UserError(
            f"--data_dir: {data_dir} holds {state} {split!r}. Expected "
            f"{LAYOUTS}."
        )
    return record_files, npz, folder


def _on_host(array):
    """An array as a tensor that stays in the memory that tf.data reads."""
    with tf.device("CPU:0"):
        return tf.constant(array)


def _in_memory(images, names):
    """A `Split` of one part from a bytearray and a list of strings."""
    images = np.frombuffer(images, np.uint8).reshape(len(names), BYTES)
    images = _on_host(images)
    return Split([len(names)], lambda _: images, lambda _, i: names[i])


def _npz_paths(folder, split):
    if split == "validation":
        path = os.path.join(folder, "val_data.npz")
        return [path] if os.path.isfile(path) else []
    found = {}
    for name in os.listdir(folder):
        match = _BATCH.fullmatch(name)
        if match:
            found[int(match[1])] = os.path.join(folder, name)
    missing = sorted(set(range(1, max(found, default=0) + 1)) - set(found))
    if missing:
        raise common.UserError(
            f"{folder}: train_data_batch_{missing[0]}.npz is missing, but "
            f"number {max(found)} is there."
        )
    return [found[number] for number in sorted(found)]


def read_npz(paths):
    """The images of files as ImageNet64 comes in, a part each.

    Args:
        paths: list of npz files with an array `data`, uint8 `[N, 12288]`: of
            each image the red, the green and the blue plane. Labels are
            ignored. They are read without numpy, which would unpickle, and
            without Python, which could not run inside tf.data.

    Returns:
        A `Split`.

    Raises:
        examples.common.UserError: a file is damaged, or holds another array.
    """
    members = [_member(path) for path in paths]
    columns = {
        key: _on_host([member[key] for member in members])
        for key in members[0]
    }

    def read(part):
        one = {key: tf.gather(column, part) for key, column in columns.items()}
        data = tf.strings.substr(
            tf.io.read_file(one["path"]), one["start"], one["length"]
        )
        data = tf.cond(
            one["deflated"],
            lambda: tf.io.decode_compressed(
                tf.strings.join([_GZIP, data, one["trailer"]]), "GZIP"
            ),
            lambda: data,
        )
        size = one["images"] * BYTES
        data = tf.strings.substr(data, one["header"], size)
        return tf.reshape(tf.io.decode_raw(data, tf.uint8), [-1, BYTES])

    stems = [os.path.basename(path).removesuffix(".npz") for path in paths]
    return Split(
        [int(member["images"]) for member in members],
        read,
        lambda part, place: f"{stems[part]}/{place}",
        channels_first=True,
    )


# A member of a zip file between these ten bytes and its checksum and size is
# a gzip file, which TensorFlow decompresses.
_GZIP = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def _member(path):
    """Where the images lie inside of an npz file; reads all of them once.

    Returns:
        Dict: `path`; `start` and `length` of the array's bytes in the file,
        `deflated` or not, with the `trailer` of a gzip file; `header`, the
        bytes before the first image; and `images`, their number.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if "data.npy" not in archive.namelist():
                raise common.UserError(
                    f"{path} has no array `data`. It holds: "
                    f"{', '.join(archive.namelist()) or 'nothing'}"
                )
            info = archive.getinfo("data.npy")
            with archive.open(info) as file:
                header, count = _check_array(path, info, file)
                # To the end, where the checksum is compared.
                while file.read(1 << 20):
                    pass
        with open(path, "rb") as file:
            file.seek(info.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
    except common.UserError:
        raise
    # The readers raise almost anything at broken files.
    except Exception as error:
        raise common.UserError(
            f"{path} is damaged, or no npz file: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {
        "path": os.fsencode(path),
        "start": np.int64(info.header_offset + 30 + sum(lengths)),
        "length": np.int64(info.compress_size),
        "deflated": info.compress_type == zipfile.ZIP_DEFLATED,
        "trailer": struct.pack("<II", info.CRC, info.file_size % 2**32),
        "header": np.int64(header),
        "images": np.int64(count),
    }


def _check_array(path, info, file):
    """Reads the header of the array `data`: its length, and the images."""
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version {version} of numpy's format")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    right = len(shape) == 2 and shape[0] > 0 and shape[1] == BYTES
    if not right or dtype != np.uint8 or fortran_order:
        order = " in Fortran's order" if fortran_order else ""
        raise common.UserError(
            f"{path}: expected `data` of uint8 [N, {BYTES}]. Received: "
            f"{dtype} {list(shape)}{order}"
        )
    if info.file_size != file.tell() + shape[0] * BYTES:
        raise common.UserError(
            f"{path} is damaged: {shape[0]} images should take "
            f"{shape[0] * BYTES} bytes, not {info.file_size - file.tell()}"
        )
    if info.compress_type == zipfile.ZIP_DEFLATED and info.file_size >= 2**31:
        raise common.UserError(
            f"{path}: expected less than 2 GiB where an array is compressed. "
            f"Received: {info.file_size:,} bytes. np.savez writes it as it is."
        )
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise common.UserError(
            f"{path}: expected what np.savez or np.savez_compressed writes. "
            f"Received: compression {info.compress_type}"
        )
    return file.tell(), shape[0]


def _tfrecords(paths):
    """Files of records, a part each; all records are looked at once."""

    def count(path):
        lengths = records.dataset([path]).map(
            lambda record: tf.strings.length(record["data"])
        )
        try:
            found = np.array(list(lengths.as_numpy_iterator()))
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as e:
            raise common.UserError(
                f"{path} is damaged, or no file of tools.prepare_data: "
                f"{e.message}"
            ) from None
        if (found != BYTES).any():
            raise common.UserError(
                f"{path}: expected records of {BYTES} bytes, a 64x64 image "
                f"each. Received: {found[found != BYTES][0]} bytes"
            )
        return len(found)

    # A split of few images leaves files empty.
    sizes = {path: count(path) for path in paths}
    paths = [path for path in paths if sizes[path]]
    if not paths:
        folder = os.path.dirname(next(iter(sizes)))
        raise common.UserError(f"The record files of {folder} are empty.")

    def read(part):
        found = records.dataset(tf.gather(paths, part)).map(
            lambda record: tf.io.decode_raw(record["data"], tf.uint8)
        )
        size = tf.gather([sizes[path] for path in paths], part)
        data = found.batch(tf.cast(size, tf.int64)).get_single_element()
        return tf.ensure_shape(data, [None, BYTES])

    def name(part, place):
        (record,) = records.dataset([paths[part]]).skip(place).take(1)
        return record["name"].numpy().decode("utf-8")

    return Split([sizes[path] for path in paths], read, name)


def _tensorflow_dataset(source, split):
    data, names = bytearray(), []
    for name, image in _examples_of_tensorflow(source, split):
        data += image
        names.append(name)
    if not names:
        raise common.UserError(f"{source}: the split {split!r} is empty.")
    return _in_memory(data, names)


def _examples_of_tensorflow(source, split):
    """Yields `(name, bytes)` of the images of a TensorFlow Dataset."""
    examples = records.tensorflow_dataset(source, split)
    for index, example in enumerate(examples):
        image = example.get("image")
        kind = (getattr(image, "dtype", None), getattr(image, "shape", None))
        if kind != (np.uint8, (SIZE, SIZE, 3)):
            raise common.UserError(
                f"{source}: expected examples with an `image`, uint8 "
                f"[{SIZE}, {SIZE}, 3]. Received: {kind[0]} {kind[1]} among "
                f"{', '.join(sorted(example))}"
            )
        yield f"{split}/{index}", image.tobytes()


def read_folder(folder):
    """All images below a folder, scaled and cropped about their centre.

    Each is decoded once, and they stay in memory. A file that is no image is
    left out, and its name printed. Links are followed, to each folder once.

    Args:
        folder: path.

    Returns:
        A `Split`.

    Raises:
        examples.common.UserError: there are no images, or a folder cannot be
            listed.
    """
    data, names = bytearray(), []
    for name, image in _examples_of_folder(folder):
        data += image
        names.append(name)
    return _in_memory(data, names)


def _examples_of_folder(folder):
    """Yields `(name, bytes)` of the images below a folder; see above."""
    paths, skipped = _files_below(folder), []
    for path in paths:
        name = common.printable(os.path.relpath(path, folder))
        try:
            image = _decode(path)
        # Pillow's readers raise almost anything at broken files.
        except Exception:
            skipped.append(name)
            continue
        yield name, image
    if len(skipped) == len(paths):
        raise common.UserError(
            f"{folder} holds no images, only {len(skipped)} other files: "
            f"{_enumerate(skipped)}"
        )
    if skipped:
        print(
            f"{common.printable(folder)}: left out {len(skipped)} of "
            f"{len(paths)} files, which are no images or damaged: "
            f"{_enumerate(skipped)}"
        )


def _files_below(folder):
    """Sorted paths of all files below a folder, through links as well."""

    def refuse(error):
        raise common.UserError(
            f"{error.filename}: expected a folder that can be listed. "
            f"Received: {error.strerror}"
        ) from error

    paths, seen = [], set()
    for parent, folders, names in os.walk(
        folder, onerror=refuse, followlinks=True
    ):
        # So that of two ways to a folder always the same one is taken.
        folders.sort()
        real = os.path.realpath(parent)
        if real in seen:  # by a link, which may lead around in a circle
            folders.clear()
            continue
        seen.add(real)
        paths.extend(os.path.join(parent, name) for name in names)
    return sorted(paths)


def _decode(path):
    """A picture of any size as the bytes of a 64x64 image."""
    with Image.open(path) as image:
        if image.mode.startswith("I;16"):
            # Pillow would cut 16 bits off at 255.
            image = Image.fromarray((np.asarray(image) >> 8).astype("uint8"))
        elif image.mode in ("I", "F"):
            raise ValueError(f"values of mode {image.mode} have no known end")
        upright = ImageOps.exif_transpose(image).convert("RGB")
    # Pillow's filters grow with the reduction, against aliasing.
    return ImageOps.fit(upright, (SIZE, SIZE)).tobytes()


def _enumerate(names, most=10):
    more = len(names) - most
    text = ", ".join(names[:most])
    return f"{text} and {more} more" if more > 0 else text


def _photographs(split):
    """Crops of the photographs inside scikit-image, at several scales."""
    package = importlib.util.find_spec("skimage")
    if package is None:
        raise common.UserError(
            "Without --data_dir the images are crops of photographs in "
            'scikit-image, which is missing: pip install "keras-performer'
            '[examples]"'
        )
    (folder,) = package.submodule_search_locations
    data, names = bytearray(), []
    for name in PHOTOGRAPHS[split]:
        path = os.path.join(folder, "data", name)
        try:
            with Image.open(path) as image:
                crops = _crops(image.convert("RGB"))
        except OSError as error:
            raise common.UserError(
                f"This scikit-image lacks the photograph {name}: {error}. "
                "Name a folder of images by --data_dir."
            ) from None
        for index, crop in enumerate(crops):
            data += crop.tobytes()
            names.append(f"{name}/{index}")
    return _in_memory(data, names)


def _crops(photograph, step=32, most=8):
    """64x64 crops of a photograph and of its halves down to that size.

    At each scale they are about `step` pixels apart, at most `most` in a row
    and in a column.
    """
    crops = []
    while min(photograph.size) >= SIZE:
        lefts, tops = (
            np.linspace(0, side - SIZE, min(most, 1 + (side - SIZE) // step))
            for side in photograph.size
        )
        for top in tops.astype(int).tolist():
            for left in lefts.astype(int).tolist():
                box = (left, top, left + SIZE, top + SIZE)
                crops.append(photograph.crop(box))
        photograph = photograph.reduce(2)
    return crops


def raw_examples(data_dir, split):
    """Yields `(name, bytes)` of all images of a split, in order.

    Args:
        data_dir: as in `load`.
        split: as in `load`.

    Yields:
        A string, and the `64 * 64 * 3` bytes of the image in raster order.
    """
    # Those that `load` would keep in memory come one at a time.
    if data_dir is not None and data_dir.startswith(records.TFDS):
        yield from _examples_of_tensorflow(data_dir, split)
        return
    if data_dir is not None and os.path.isdir(data_dir):
        record_files, _, folder = _sources(data_dir, split)
        if record_files:
            yield from records.read(record_files)
            return
        if folder:
            yield from _examples_of_folder(folder)
            return
    source = load(data_dir, split)
    for part, size in enumerate(source.sizes):
        data = source.read(tf.constant(part, tf.int64))
        for start in range(0, size, 1024):
            images = source.images(data[start : start + 1024]).numpy()
            for place, image in enumerate(images, start):
                yield source.name(part, place), image.tobytes()


def _sub_pixels(split, data, config):
    """Bytes `[B, BYTES]` -> ids in raster order `[B, L]`, int32."""
    images = split.images(data, config.image_size)
    return tf.cast(tf.reshape(images, [-1, config.sequence_length]), tf.int32)


def _inputs(targets):
    """Targets `[B, L]` -> inputs: one place later, 0 first."""
    return tf.pad(targets[:, :-1], [[0, 0], [1, 0]])


def training_dataset(split, config, skip=0, shard=(0, 1)):
    """Endless batches of shuffled images, the same for the same seed.

    Each pass takes the parts in a new order, and all images of a part, in a
    new order, before the next part is read. Both orders are computed, not
    kept: beginning in the midst of them costs nothing.

    Args:
        split: `Split`.
        config: `config.Config`: `image_size`, `batch_size`, `seed`.
        skip: int, batches to leave out at the start.
        shard: `(index, count)`: of all images this worker, one of `count`,
            sees its own share, in batches of its own.

    Returns:
        `tf.data.Dataset` of `(x, y)`, int32 `[batch_size, L]`, all static.

    Raises:
        examples.common.UserError: there are fewer images than workers.
    """
    worker, workers = shard
    parts, seed = len(split.sizes), config.seed
    shares = [len(range(worker, size, workers)) for size in split.sizes]
    if not sum(shares):
        raise common.UserError(
            f"The training split has {split.num_images} images for {workers} "
            "workers."
        )

    def shuffled(place, count, pass_, stream):
        """Where the image or the part `place` of `count` went to."""
        return tf.random.experimental.index_shuffle(
            place, seed=[seed, 2 * pass_ + stream], max_index=count - 1
        )

    def part_of(visit):
        return shuffled(visit % parts, parts, visit // parts, 0)

    # Where the batch after the skipped ones begins.
    passes, skipped = divmod(skip * config.batch_size, sum(shares))
    first_visit = passes * parts
    while skipped >= (share := shares[int(part_of(np.int64(first_visit)))]):
        skipped -= share
        first_visit += 1

    def images(visit):
        part = part_of(visit)
        data = split.read(part)
        size = tf.gather(tf.constant(split.sizes, tf.int64), part)
        before = tf.where(visit == first_visit, skipped * workers, 0)
        places = tf.data.Dataset.range(
            worker + tf.cast(before, tf.int64), size, workers
        )
        return places.map(lambda place: data[shuffled(place, size, visit, 1)])

    def pair(data):
        targets = _sub_pixels(split, data, config)
        return _inputs(targets), targets

    return (
        tf.data.Dataset.counter(first_visit)
        .flat_map(images)
        .batch(config.batch_size, drop_remainder=True)
        .map(pair)
        .apply(
            tf.data.experimental.assert_cardinality(
                tf.data.INFINITE_CARDINALITY
            )
        )
        .prefetch(2)
    )


def evaluation_dataset(split, config, shard=(0, 1)):
    """Every image exactly once, in order.

    Args:
        split: `Split`.
        config: `config.Config`: `image_size`, `batch_size`.
        shard: as in `training_dataset`.

    Returns:
        `tf.data.Dataset` of `(x, y, weight)`. x and y are int32 and weight
        float32, `[batch_size, L]`, all static; weight is 1, and 0 in rows
        that fill up the last batch. The number of batches is known: Keras
        warns of a data set that ends unforeseen.
    """
    worker, workers = shard
    batch_size, length = config.batch_size, config.sequence_length

    def images(part):
        data = split.read(part)[worker::workers]
        return tf.data.Dataset.from_tensor_slices(data)

    def fill(data):
        targets = _sub_pixels(split, data, config)
        missing = [[0, batch_size - tf.shape(targets)[0]], [0, 0]]
        weight = tf.pad(tf.ones_like(targets, tf.float32), missing)
        targets = tf.pad(targets, missing)
        return tuple(
            tf.ensure_shape(array, [batch_size, length])
            for array in (_inputs(targets), targets, weight)
        )

    total = sum(len(range(worker, size, workers)) for size in split.sizes)
    return (
        tf.data.Dataset.range(len(split.sizes))
        .flat_map(images)
        .batch(batch_size)
        .map(fill)
        .apply(
            tf.data.experimental.assert_cardinality(-(-total // batch_size))
        )
        .prefetch(2)
    )


def validation_dataset(split, config):
    """`evaluation_dataset`, or as much of it as the config wants."""
    dataset = evaluation_dataset(split, config)
    if config.validation_batches is not None:
        dataset = dataset.take(config.validation_batches)
    return dataset
