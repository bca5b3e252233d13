"""Draws images from a trained model, or completes the lower half of others.

    python -m examples.imagenet64.generate
    python -m examples.imagenet64.generate --complete=validation
    python -m examples.imagenet64.generate --complete=FOLDER \\
        --model=runs/imagenet64-small/best.keras

The model is the `.keras` file of a training run; its `config.json` must still
stand beside it. The result is a PNG file, and an image in TensorBoard as well
with `--log_dir`.
"""

import os

import numpy as np
import tensorflow as tf
from absl import flags

from examples import common
from examples.imagenet64 import config as configs
from examples.imagenet64 import data


def complete(model, given, length, temperature=1.0, seed=0, **options):
    """Draws what is missing of images.

    Args:
        model: causal `keras_performer.PerformerLM` of `length` learned
            positions, not of "exact" attention.
        given: ids `[B, K]`, the first sub-pixels of each image. K may be 0.
        length: int, L, the sub-pixels of an image; more than K.
        temperature: number; below 1 safer, 0 always the likeliest.
        seed: int, seed of the draws.
        **options: `top_k` and `top_p` of `keras_performer.models.sample`.

    Returns:
        int32 numpy ids `[B, L]`; the first K are the given ones.
    """
    ids = np.pad(np.asarray(given, "int32"), [(0, 0), (1, 0)])  # the start
    new = model.generate(
        ids,
        length - given.shape[1],
        temperature=temperature,
        seed=seed,
        **options,
    )
    return np.concatenate([ids, new], axis=1)[:, 1:]


def draw(model, config, count, seed=0, **options):
    """New images, uint8 `[count, size, size, 3]`; see `complete`."""
    nothing = np.zeros((count, 0), "int32")
    ids = complete(
        model, nothing, config.sequence_length, seed=seed, **options
    )
    return _to_images(ids, config)


def _to_images(ids, config):
    size = config.image_size
    return ids.reshape(-1, size, size, 3).astype("uint8")


def complete_lower_half(model, config, images, completions, **options):
    """Rows of a picture: an image, its upper half, completions of it.

    Args:
        model: see `complete`.
        config: `config.Config`.
        images: uint8 `[N, size, size, 3]`.
        completions: int, C, of each image.
        **options: of `complete`.

    Returns:
        uint8 `[N, 2 + C, size, size, 3]`.
    """
    size = config.image_size
    half = images.copy()
    half[:, size // 2 :] = 127
    known = images[:, : size // 2].reshape(len(images), -1)
    ids = complete(
        model,
        np.repeat(known, completions, axis=0),
        config.sequence_length,
        **options,
    )
    shape = (len(images), completions, size, size, 3)
    return np.concatenate(
        [images[:, None], half[:, None], ids.reshape(shape).astype("uint8")],
        axis=1,
    )


def grid(images, columns=None, gap=1):
    """One picture of many.

    Args:
        images: uint8 `[R, C, H, W, 3]`, or `[N, H, W, 3]`.
        columns: int, pictures in a row of N; None: about a square.
        gap: int, white pixels around each.

    Returns:
        uint8 `[rows, columns, 3]`.
    """
    if images.ndim == 4:
        columns = columns or int(np.ceil(len(images) ** 0.5))
        missing = -len(images) % columns
        white = np.full((missing, *images.shape[1:]), 255, "uint8")
        images = np.concatenate([images, white])
        images = images.reshape(-1, columns, *images.shape[1:])
    around = [(0, 0), (0, 0), (gap, gap), (gap, gap), (0, 0)]
    images = np.pad(images, around, constant_values=255)
    rows, columns, height, width, _ = images.shape
    return images.transpose(0, 2, 1, 3, 4).reshape(
        rows * height, columns * width, 3
    )


def write_png(path, picture, least=512):
    """Writes a picture, its pixels enlarged to `least` rows or columns."""
    factor = -(-least // max(picture.shape[:2]))
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    tf.io.write_file(path, tf.io.encode_png(picture))


def find_images(source, data_dir, config, count):
    """Images to complete, as many as there are up to `count`.

    Args:
        source: "validation", a folder of images or an npz file.
        data_dir: see `data.load`, for "validation".
        config: `config.Config`.
        count: int. They are taken from all over the source.

    Returns:
        uint8 `[N, size, size, 3]`.

    Raises:
        examples.common.UserError: there are none.
    """
    if source == "validation":
        split = data.load(data_dir, source)
    elif os.path.isdir(source):
        split = data.read_folder(source)
    elif os.path.isfile(source):
        split = data.read_npz([source])
    else:
        raise common.UserError(
            "--complete: expected `validation`, a folder of images or an npz "
            f"file. Received: {source}"
        )
    total = split.num_images
    wanted = np.linspace(0, total, min(count, total), endpoint=False)
    ends = np.cumsum(split.sizes)
    parts = np.searchsorted(ends, wanted.astype(int), side="right")
    places = wanted.astype(int) - (ends - split.sizes)[parts]
    images = []
    for part in np.unique(parts):
        read = split.read(tf.constant(part, tf.int64))
        images.append(tf.gather(read, places[parts == part]))
    images = tf.concat(images, axis=0)
    return split.images(images, config.image_size).numpy()


def load(path):
    """A model that draws, and its config.

    Raises:
        examples.common.UserError: it is none.
    """
    model = common.load_model(path, "--model")
    folder = os.path.dirname(os.path.abspath(path))
    return model, common.read_config(configs.Config, folder)


def define_flags(flag_values=flags.FLAGS):
    """Defines the flags of this command."""
    strings = {
        "model": (
            "runs/imagenet64-smoke/best.keras",
            "The .keras file of a training run.",
        ),
        "complete": (
            None,
            "Complete the lower half of images instead: `validation` (the "
            "split of --data_dir), a folder of images or an npz file.",
        ),
        "data_dir": (
            None,
            "Where the images to complete are: folder of images, npz or "
            "record files, or tfds:NAME; none: those of the training.",
        ),
        "output": (
            None,
            "PNG file to write; none: drawn.png or completed.png beside the "
            "model.",
        ),
        "log_dir": (None, "Folder for TensorBoard; none: not written."),
    }
    for name, (default, text) in strings.items():
        flags.DEFINE_string(
            name,
            default,
            text,
            flag_values=flag_values,
            # absl has a `log_dir` of its own, for files that it never writes
            # here.
            allow_override=name == "log_dir",
        )
    integers = {
        "num_images": (4, 1, "Images to draw, or to complete."),
        "completions": (3, 1, "Completions of each image."),
        "seed": (0, 0, "Of the draws."),
        "top_k": (
            None,
            1,
            "Draw from so many of the likeliest values; none: all.",
        ),
    }
    for name, (default, least, text) in integers.items():
        flags.DEFINE_integer(
            name, default, text, lower_bound=least, flag_values=flag_values
        )
    flags.DEFINE_float(
        "temperature",
        1.0,
        "0: the likeliest value.",
        lower_bound=0.0,
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "top_p",
        None,
        "Draw from the likeliest of this probability; none: all.",
        lower_bound=0.0,
        upper_bound=1.0,
        flag_values=flag_values,
    )


def main(options=flags.FLAGS):
    """Runs the command."""
    if options.top_p == 0:
        raise common.UserError("--top_p: expected more than 0. Received: 0")
    if options.complete is None:
        for name in ("data_dir", "completions"):
            if options[name].present:
                raise common.UserError(f"--{name} needs --complete.")
    elif options.complete != "validation" and options["data_dir"].present:
        raise common.UserError(
            "--data_dir: only --complete=validation reads it. Received: "
            f"--complete={options.complete}"
        )
    model, config = load(options.model)
    folder = os.path.dirname(os.path.abspath(options.model))
    settings = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
    }
    if options.complete is None:
        name = "drawn"
        images = draw(model, config, options.num_images, **settings)
    else:
        name = "completed"
        data_dir = options.data_dir
        if options.complete == "validation":
            data_dir = common.evaluation_data_dir(
                data_dir, folder, configs.EMBEDDED
            )
        images = find_images(
            options.complete, data_dir, config, options.num_images
        )
        images = complete_lower_half(
            model, config, images, options.completions, **settings
        )
    picture = grid(images)
    path = options.output or os.path.join(folder, f"{name}.png")
    write_png(path, picture)
    print(path)
    if options.log_dir is not None:
        with tf.summary.create_file_writer(options.log_dir).as_default(0):
            tf.summary.image(name, picture[None])


if __name__ == "__main__":
    define_flags()
    common.run(main)
