"""The image pipeline of examples/imagenet64: readers, windows, damage."""

import io
import os
import struct
import sys
import types
import zipfile

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("skimage", reason="the examples use its photographs")

from PIL import Image

from examples import common
from examples import records
from examples.imagenet64 import config as configs
from examples.imagenet64 import data

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

CONFIG = configs.Config(image_size=4, batch_size=3, seed=5)
LENGTH = 4 * 4 * 3


def numbered(count, first=0):
    """Images `[N, 64, 64, 3]` that differ: red is the image's number."""
    images = np.random.default_rng(0).integers(0, 256, [count, 64, 64, 3])
    images[..., 0] = np.arange(first, first + count)[:, None, None]
    return images.astype("uint8")


def planes(images):
    """As the official files hold them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_npz(path, images, save=np.savez_compressed, **arrays):
    # The number of a class is 1-based, and this one is no number of an image.
    labels = np.full(len(images), 777)
    mean = np.zeros(12288)
    save(path, data=planes(images), labels=labels, mean=mean, **arrays)


@pytest.fixture
def folder(tmp_path):
    """ImageNet64's layout: files of 5, 1 and 4 images, and 4 to validate."""
    for number, (first, count) in {1: (0, 5), 2: (5, 1), 3: (6, 4)}.items():
        write_npz(
            tmp_path / f"train_data_batch_{number}.npz",
            numbered(count, first),
            # What is stored as it is must be read as well.
            np.savez if number == 2 else np.savez_compressed,
        )
    write_npz(tmp_path / "val_data.npz", numbered(4, 100))
    return str(tmp_path)


def all_images(split):
    parts = [
        split.images(split.read(tf.constant(part, tf.int64))).numpy()
        for part in range(len(split.sizes))
    ]
    return np.concatenate(parts)


def numbers(dataset, batches):
    """The numbers of the images in so many batches, `[batches, B]`."""
    return np.array([y[:, 0] for _, y, *_ in dataset.take(batches)])


# --- readers ---------------------------------------------------------------


def test_official_files_give_their_images_in_natural_order(folder):
    split = data.load(folder, "train")
    assert split.sizes == [5, 1, 4] and split.num_images == 10
    expected = [numbered(5), numbered(1, 5), numbered(4, 6)]
    np.testing.assert_array_equal(all_images(split), np.concatenate(expected))
    validation = data.load(folder, "validation")
    np.testing.assert_array_equal(all_images(validation), numbered(4, 100))
    assert split.name(2, 3) == "train_data_batch_3/3"


def test_raw_examples_are_bytes_in_raster_order(folder):
    found = list(data.raw_examples(folder, "train"))
    assert [name for name, _ in found][4:6] == [
        "train_data_batch_1/4",
        "train_data_batch_2/0",
    ]
    assert found[0][1] == numbered(5)[0].tobytes()
    assert len(found) == 10


def test_records_give_what_was_written(folder, tmp_path):
    target = tmp_path / "records"
    target.mkdir()
    examples = list(data.raw_examples(folder, "train"))
    for index, part in enumerate((examples[:7], [], examples[7:])):
        path = target / f"train-{index:05d}-of-00003.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for example in part:
                writer.write(records.serialize(*example))
    split = data.load(str(target), "train")
    assert split.sizes == [7, 3]
    np.testing.assert_array_equal(
        all_images(split), all_images(data.load(folder, "train"))
    )
    assert split.name(1, 2) == "train_data_batch_3/3"
    assert list(data.raw_examples(str(target), "train")) == examples


@pytest.mark.parametrize(
    "damage, message",
    [
        ("cut", "is damaged"),
        ("size", "records of 12288 bytes.*Received: 5 bytes"),
        ("empty", "are empty"),
        ("missing", "number 1 is missing"),
    ],
)
def test_records_that_cannot_be_read_are_named(tmp_path, damage, message):
    of = 2 if damage == "missing" else 1
    path = tmp_path / f"train-00000-of-0000{of}.tfrecord"
    size = 5 if damage == "size" else 12288
    with tf.io.TFRecordWriter(str(path)) as writer:
        if damage != "empty":
            writer.write(records.serialize("a", bytes(size)))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(common.UserError, match=message) as caught:
        data.load(str(tmp_path), "train")
    assert str(tmp_path) in str(caught.value)


def tensorflow_datasets(**splits):
    """A stand-in for the package: its `load` and `as_numpy`."""

    def load(name, split, data_dir):
        assert name == "imagenet_resized/64x64"
        return splits[split]

    return types.SimpleNamespace(load=load, as_numpy=iter)


def test_tensorflow_datasets(monkeypatch):
    images = numbered(3)
    module = tensorflow_datasets(
        train=[{"image": image, "label": 1} for image in images],
        validation=[{"image": images[0][:32]}],
        other=[{"text": b""}],
        nothing=[],
    )
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    source = "tfds:imagenet_resized/64x64"
    split = data.load(source, "train")
    np.testing.assert_array_equal(all_images(split), images)
    found = list(data.raw_examples(source, "train"))
    assert found[2] == ("train/2", images[2].tobytes())
    for name, message in (
        ("validation", r"expected.*uint8.*Received: uint8 \(32, 64, 3\)"),
        ("other", "Received: None None among text"),
        ("nothing", "'nothing' is empty"),
        ("absent", "KeyError"),
    ):
        with pytest.raises(common.UserError, match=message):
            data.load(source, name)


def test_without_tensorflow_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(common.UserError, match=r"keras-performer\[tfds\]"):
        data.load("tfds:downsampled_imagenet/64x64", "train")


def test_a_folder_of_images_is_scaled_cropped_and_others_named(
    tmp_path, capsys
):
    target = tmp_path / "train" / "cats"
    target.mkdir(parents=True)
    # Left and right thirds red, the square in the middle green over blue.
    wide = np.zeros((128, 384, 3), "uint8")
    wide[..., 0] = 255
    wide[:64, 128:256] = (0, 255, 0)
    wide[64:, 128:256] = (0, 0, 255)
    Image.fromarray(wide).save(target / "wide.png")
    Image.fromarray(numbered(1)[0]).save(target / "a.png")
    Image.new("L", (20, 30), 9).save(target / "grey.jpg")
    (target / "notes.txt").write_text("no image")
    cut = (target / "wide.png").read_bytes()
    (target / "cut.png").write_bytes(cut[: len(cut) // 2])
    split = data.load(str(tmp_path), "train")
    printed = capsys.readouterr().out
    assert "left out 2 of 5 files" in printed
    assert "cut.png" in printed and "notes.txt" in printed
    square, grey, found = all_images(split)
    np.testing.assert_array_equal(square, numbered(1)[0])
    assert (grey == 9).all()
    np.testing.assert_array_equal(found[0, 5], (0, 255, 0))
    np.testing.assert_array_equal(found[63, 60], (0, 0, 255))
    assert (found[..., 0] == 0).mean() > 0.9
    assert split.name(0, 1) == os.path.join("cats", "grey.jpg")


def test_images_made_smaller_are_not_aliased(tmp_path):
    # Stripes of one pixel: every second one alone would be black or white.
    (tmp_path / "train").mkdir()
    stripes = np.zeros((256, 256, 3), "uint8")
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "train" / "a.png")
    (image,) = all_images(data.load(str(tmp_path), "train"))
    assert abs(image[:, 4:-4].astype(int) - 127).max() < 20


def test_a_folder_without_images_is_an_error(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(common.UserError, match="holds no images, only 0"):
        data.load(str(tmp_path), "train")
    (tmp_path / "train" / "a.png").write_text("no image")
    with pytest.raises(common.UserError, match="only 1 other files: a.png"):
        data.load(str(tmp_path), "train")


def test_a_missing_folder_or_split_is_named(folder, tmp_path):
    with pytest.raises(common.UserError, match="no folder .*absent"):
        data.load(str(tmp_path / "absent"), "train")
    os.remove(tmp_path / "val_data.npz")
    with pytest.raises(common.UserError, match="'validation'.*val_data.npz"):
        data.load(folder, "validation")
    assert data.load(folder, "train").num_images == 10


# --- damaged npz files -----------------------------------------------------


def member(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def zipped(content, compression=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("data.npy", content)
    return file.getvalue()


GOOD = member(planes(numbered(3)))


def flipped(archive):
    """An archive with one wrong bit in its images."""
    place = len(archive) // 2
    return archive[:place] + bytes([archive[place] ^ 1]) + archive[place + 1 :]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is damaged, or no npz file"),
        (b"text", "is damaged, or no npz file"),
        (zipped(GOOD)[:-500], "is damaged, or no npz file"),
        (flipped(zipped(GOOD)), "is damaged, or no npz file"),
        (flipped(zipped(GOOD, zipfile.ZIP_STORED)), "is damaged"),
        (zipped(b"no array"), "is damaged, or no npz file"),
        (zipped(GOOD[:-9]), "is damaged: 3 images should take 36864 bytes"),
        (zipped(GOOD, zipfile.ZIP_BZIP2), "Received: compression 12"),
        (zipped(member(np.zeros([2, 12288]))), r"float64 \[2, 12288\]"),
        (zipped(member(np.zeros([2, 9], "u1"))), r"uint8 \[2, 9\]"),
        (zipped(member(np.zeros([0, 12288], "u1"))), r"uint8 \[0, 12288\]"),
        (zipped(member(numbered(1))), r"uint8 \[1, 64, 64, 3\]"),
        (
            zipped(member(np.asfortranarray(planes(numbered(2))))),
            "Fortran's order",
        ),
        (zipped(member(np.array([{}, 1], object))), r"object \[2\]"),
        # A bracket that is not closed: Python's tokenizer gives up.
        (zipped(GOOD.replace(b"), }", b" , }")), "no npz file: TokenError"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "train_data_batch_1.npz"
    path.write_bytes(content)
    with pytest.raises(common.UserError, match=message) as caught:
        data.load(str(tmp_path), "train")
    assert str(path) in str(caught.value)


def test_a_file_without_images_tells_what_it_holds(tmp_path):
    np.savez(tmp_path / "val_data.npz", pixels=np.zeros(3))
    with pytest.raises(common.UserError, match="no array `data`.*pixels.npy"):
        data.load(str(tmp_path), "validation")


def test_a_local_header_longer_than_the_directory_says(tmp_path):
    # np.savez forces zip64, whose extra field stands in the local header
    # alone: the place of the data must be read from there.
    path = tmp_path / "val_data.npz"
    np.savez(path, data=planes(numbered(2)))
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("data.npy")
    extra = struct.unpack("<H", raw[info.header_offset + 28 :][:2])[0]
    assert extra > 0 and not info.extra
    split = data.load(str(tmp_path), "validation")
    np.testing.assert_array_equal(all_images(split), numbered(2))


# --- sequences -------------------------------------------------------------


def operations(dataset):
    """Names of all operations in the dataset's graph and its functions."""
    graph = tf.compat.v1.GraphDef()
    variant = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor
    )
    graph.ParseFromString(variant.numpy())
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes.extend(function.node_def)
    return {node.op for node in nodes}


def test_o63_shapes_are_static_without_strings_or_python(folder):
    split = data.load(folder, "train")
    for dataset in (
        data.training_dataset(split, CONFIG),
        data.validation_dataset(split, CONFIG),
    ):
        for spec in dataset.element_spec:
            assert spec.shape == (3, LENGTH)
            assert spec.dtype in (tf.int32, tf.float32)
        found = operations(dataset)
        assert "ReadFile" in found  # the look inside works
        assert not any("PyFunc" in name for name in found)


def test_o64_targets_are_the_inputs_one_place_earlier(folder):
    split = data.load(folder, "train")
    for dataset in (
        data.training_dataset(split, CONFIG),
        data.validation_dataset(split, CONFIG),
    ):
        for x, y, *_ in dataset.take(4):
            assert (x[:, 0] == 0).numpy().all()
            np.testing.assert_array_equal(x[:, 1:], y[:, :-1])


def test_sub_pixels_are_the_image_in_raster_order(folder):
    config = configs.Config(image_size=64, batch_size=2)
    split = data.load(folder, "validation")
    ((_, y, _), *_) = data.validation_dataset(split, config)
    expected = numbered(4, 100)[:2].reshape(2, -1)
    np.testing.assert_array_equal(y, expected)


def test_smaller_images_are_rounded_means(folder):
    split = data.load(folder, "validation")
    ((_, y, _), *_) = data.validation_dataset(split, CONFIG)
    images = numbered(4, 100)[:3].astype(float)
    means = images.reshape(3, 4, 16, 4, 16, 3).mean(axis=(2, 4))
    np.testing.assert_array_equal(y, np.round(means).reshape(3, -1))


def test_a_pass_takes_every_image_once_and_each_in_another_order(folder):
    split = data.load(folder, "train")
    config = configs.Config(image_size=4, batch_size=10)
    passes = numbers(data.training_dataset(split, config), 4)
    for one in passes:
        assert sorted(one) == list(range(10))
    assert len({tuple(one) for one in passes}) == 4
    # The images of a file come together, and the files in several orders.
    many = numbers(data.training_dataset(split, config), 20)
    files = np.searchsorted(np.cumsum(split.sizes), many, side="right")
    assert np.all((files[:, 1:] != files[:, :-1]).sum(axis=1) == 2)
    assert set(files[:, 0]) == {0, 1, 2}


def test_files_come_by_their_number_and_none_is_missing(tmp_path):
    for number in range(1, 12):
        (tmp_path / f"train_data_batch_{number}.npz").touch()
    found = data._npz_paths(str(tmp_path), "train")
    names = [f"train_data_batch_{number}.npz" for number in range(1, 12)]
    assert [path.rsplit("/")[-1] for path in found] == names
    (tmp_path / "train_data_batch_7.npz").unlink()
    with pytest.raises(common.UserError, match="batch_7.npz is missing"):
        data.load(str(tmp_path), "train")


def test_two_forms_of_a_split_are_refused(folder, tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(common.UserError, match="more than one form.*'train'"):
        data.load(folder, "train")


def test_a_picture_of_sixteen_bits_keeps_its_greys(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype("uint16")
    picture = Image.fromarray(np.tile(ramp, (64, 1)))
    picture.save(tmp_path / "ramp.png")
    split = data.read_folder(str(tmp_path))
    pixels = split.images(split.read(tf.constant(0, tf.int64)))
    np.testing.assert_array_equal(pixels[0, 5, :, 0], ramp >> 8)


def test_whatever_a_reader_raises_a_file_is_left_out(
    tmp_path, monkeypatch, capsys
):
    for name in "ab":
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
    decode = data._decode

    def broken(path):
        if path.endswith("a.png"):
            raise TypeError("bad operand type for abs(): 'str'")
        return decode(path)

    monkeypatch.setattr(data, "_decode", broken)
    assert data.read_folder(str(tmp_path)).num_images == 1
    assert "left out 1 of 2 files" in capsys.readouterr().out


def test_records_are_made_of_pictures_one_at_a_time(tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    for name in "abc":
        Image.new("RGB", (64, 64)).save(tmp_path / "train" / f"{name}.png")
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("read whole"))
    names = [name for name, _ in data.raw_examples(str(tmp_path), "train")]
    assert names == ["a.png", "b.png", "c.png"]


def test_links_are_followed_and_each_folder_is_read_once(tmp_path):
    train, other = tmp_path / "train", tmp_path / "other"
    for folder in (train / "cats", other / "wild"):
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(folder / "a.png")
    (train / "dogs").symlink_to(other)
    (train / "hounds").symlink_to(other)
    (train / "wild").symlink_to(other / "wild")
    # Two ways around in a circle.
    (train / "cats" / "self").symlink_to(train / "cats")
    (other / "wild" / "up").symlink_to(tmp_path)
    (train / "b.png").symlink_to(train / "cats" / "a.png")
    names = [name for name, _ in data.raw_examples(str(tmp_path), "train")]
    assert names == ["b.png", "cats/a.png", "dogs/wild/a.png"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    closed = tmp_path / "train" / "closed"
    closed.mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(tmp_path / "train" / "a.png")
    scandir = os.scandir

    def refuse(path):  # a mode of 0 would not keep out root
        if os.fspath(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(closed))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        common.UserError, match="train/closed: .*Received: Permission denied"
    ):
        data.load(str(tmp_path), "train")


def test_a_name_in_another_encoding_is_read(tmp_path, capsys):
    folder = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9"))
    target = os.path.join(folder, "train")
    os.makedirs(target)
    for name in (b"caf\xe9.png", b"a.png"):
        path = os.path.join(os.fsencode(target), name)
        Image.new("RGB", (64, 64)).save(os.fsdecode(path))
    with open(os.path.join(os.fsencode(target), b"\xff.txt"), "w"):
        pass
    split = data.read_folder(target)
    assert [split.name(0, i) for i in range(2)] == ["a.png", r"caf\xe9.png"]
    assert r"damaged: \xff.txt" in capsys.readouterr().out
    write_npz(os.path.join(folder, "val_data.npz"), numbered(2))
    np.testing.assert_array_equal(
        all_images(data.load(folder, "validation")), numbered(2)
    )


def test_training_is_the_same_for_the_same_seed_only(folder):
    split = data.load(folder, "train")
    same, again = (
        numbers(data.training_dataset(split, CONFIG), 9) for _ in range(2)
    )
    np.testing.assert_array_equal(same, again)
    other = configs.Config(image_size=4, batch_size=3, seed=6)
    assert (numbers(data.training_dataset(split, other), 9) != same).any()


@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_skipping_begins_at_the_same_batch(folder, shard):
    split = data.load(folder, "train")
    every = numbers(data.training_dataset(split, CONFIG, shard=shard), 14)
    for skip in range(12):
        rest = data.training_dataset(split, CONFIG, skip, shard)
        np.testing.assert_array_equal(numbers(rest, 2), every[skip:][:2])


def test_skipping_reads_no_image(folder):
    split = data.load(folder, "train")
    # A billion batches: more than could be read in a year.
    dataset = data.training_dataset(split, CONFIG, skip=10**9)
    (batch,) = dataset.take(1)
    assert batch[0].shape == dataset.element_spec[0].shape


def test_shards_are_disjoint_and_complete(folder):
    split = data.load(folder, "train")
    config = configs.Config(image_size=4, batch_size=1)
    # Of 5, 1 and 4 images a worker of two has 3 + 1 + 2 or 2 + 0 + 2.
    found = [
        numbers(data.training_dataset(split, config, shard=(index, 2)), count)
        for index, count in ((0, 6), (1, 4))
    ]
    assert sorted(np.concatenate(found)[:, 0]) == list(range(10))
    with pytest.raises(common.UserError, match="10 images for 11 workers"):
        data.training_dataset(split, config, shard=(10, 11))
    found = []
    for index in range(3):
        for _, y, weight in data.evaluation_dataset(
            split, CONFIG, shard=(index, 3)
        ):
            found.extend(y[:, 0].numpy()[weight[:, 0].numpy() > 0])
    assert sorted(found) == list(range(10))


@pytest.mark.parametrize("batch_size", [1, 3, 5, 16])
def test_evaluation_sees_every_image_once(folder, batch_size):
    split = data.load(folder, "train")
    config = configs.Config(image_size=4, batch_size=batch_size)
    dataset = data.evaluation_dataset(split, config)
    found = []
    for _, y, weight in dataset:
        assert (weight.numpy() == weight.numpy()[:, :1]).all()
        found.extend(y[:, 0].numpy()[weight[:, 0].numpy() == 1])
    assert found == list(range(10))
    assert int(dataset.cardinality()) == -(-10 // batch_size)


def test_validation_can_be_cut(folder):
    split = data.load(folder, "train")
    config = configs.Config(image_size=4, batch_size=3, validation_batches=2)
    dataset = data.validation_dataset(split, config)
    assert int(dataset.cardinality()) == len(list(dataset)) == 2


# --- what is there without a download --------------------------------------


def test_o65_photographs_split_without_overlap():
    train, again = (data.load(None, "train") for _ in range(2))
    validation = data.load(None, "validation")
    assert train.num_images > 500 and validation.num_images > 50
    np.testing.assert_array_equal(all_images(train), all_images(again))
    named = [
        {name.split("/")[0] for name, _ in data.raw_examples(None, split)}
        for split in data.SPLITS
    ]
    assert named[0] == set(data.PHOTOGRAPHS["train"])
    assert named[1] == {"chelsea.png"}


def test_without_scikit_image_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(common.UserError, match=r"keras-performer\[examples"):
        data.load(None, "train")
    monkeypatch.setattr(
        data.importlib.util,
        "find_spec",
        lambda name: types.SimpleNamespace(
            submodule_search_locations=[str(tmp_path)]
        ),
    )
    with pytest.raises(common.UserError, match="lacks .*chelsea.png"):
        data.load(None, "validation")


def test_crops_lie_inside_at_every_scale():
    # Each pixel holds its place.
    rows, columns = np.mgrid[0:130, 0:200].astype("uint8")
    photograph = np.stack([rows, columns, 0 * rows], axis=-1)
    crops = [np.array(x) for x in data._crops(Image.fromarray(photograph))]
    # 3 x 5 at the full size, and 65 x 100 holds 1 x 2.
    assert len(crops) == 15 + 2
    corners = {tuple(crop[0, 0, :2]) for crop in crops[:15]}
    assert len(corners) == 15 and (66, 136) in corners and (0, 0) in corners
    assert all(crop.shape == (64, 64, 3) for crop in crops)
