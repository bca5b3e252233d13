r"""Measures what the far part of causal attention adds to a local window.

Trains small causal models on tasks that need distance, and on text, with
several kinds of attention beyond the window:

- `recall`: 8 pairs of a key and a value stand at the start; after a long
  stretch of noise, keys are asked for their values. Chance is 1/16.
- `copy`: a passage of 16 different symbols (of 32) at the start is to be
  repeated after a long stretch of noise, symbol by symbol. It takes two
  layers: which symbol was the last, and what followed it before. Chance is
  1/32.
- `text_1024`, `text_4096`: the next byte of PG-19 (needs `--data_dir`), in
  windows of that length.

    python -m tools.far_field --tasks=recall,copy --output_dir=/tmp/far_field

Results are kept in `OUTPUT_DIR/results.jsonl`, one line for each run, which
is not run again: stop and repeat the command at will. `table.md` and
`far_field.png` are written anew after each run.
"""

import collections
import dataclasses
import json
import os
import time

import keras
import numpy as np
from absl import flags
from keras import layers

import keras_performer
from examples import common
from keras_performer import feature_maps

TASKS = ("recall", "copy", "text_1024", "text_4096")

VALIDATION_SEQUENCES, VALIDATION_TOKENS = 128, 65536
SETTINGS = (
    "steps checkpoints batch_size window num_features num_layers num_heads "
    "width learning_rate"
).split()

KEYS, VALUES, PAIRS, QUESTIONS, SPAN = 32, 16, 8, 32, 32
SYMBOLS, PASSAGE, NOISE = 32, 16, 32


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kind of attention: arguments of `PerformerBlock`."""

    feature_map: object
    local_window: int | None
    num_features: int
    redraw_interval: int | None = None


def variants(window, num_features):
    """All kinds, by name, for a window of so many tokens."""
    maps = {
        "exact": "exact",
        "window alone": common.get_feature_map("window"),
        "favor+": "favor+",
        "favor++": "favor++",
        "favor#": "favor#",
        "favor+ trained weight from 1": feature_maps.FavorPlus(far_weight=1.0),
        "favor+ trained weight from 0.1": feature_maps.FavorPlus(
            far_weight=0.1
        ),
        "favor+ trained weight from 0.02": feature_maps.FavorPlus(
            far_weight=0.02
        ),
        "regularized": feature_maps.FavorPlus(regularized=True),
        "hedgehog": feature_maps.LearnedFeatures(),
        "hedgehog from 0.1": feature_maps.LearnedFeatures(far_weight=0.1),
    }
    found = {
        name: Variant(value, None if name == "exact" else window, num_features)
        for name, value in maps.items()
    }
    found["pure favor+"] = Variant("favor+", 0, num_features)
    found["pure hedgehog"] = Variant("hedgehog", 0, num_features)
    redrawn = {
        "favor+ redraw": "favor+",
        "favor+ redraw from 0.1": maps["favor+ trained weight from 0.1"],
        "favor++ redraw from 0.1": feature_maps.FavorPlusPlus(far_weight=0.1),
        "favor+ redraw from 0.1 with temperature": feature_maps.FavorPlus(
            temperature=0.5, far_weight=0.1
        ),
    }
    for name, value in redrawn.items():
        found[name] = Variant(value, window, num_features, redraw_interval=50)
    return found


def recall_data(count, distance, rng):
    """Sequences, targets and weights of the recall task.

    Args:
        count: Number of sequences.
        distance: Least distance of a question from its pair, in tokens.
        rng: `numpy.random.Generator`.

    Returns:
        Ids `[count, L, 2]` (key, value; key 0 is none, value VALUES is the
        question), targets `[count, L]` and weights, 1 where a question
        stands, and 0.
    """
    length = SPAN + distance + QUESTIONS
    ids = np.zeros((count, length, 2), "int32")
    ids[:, :, 1] = rng.integers(0, VALUES, (count, length))
    targets = np.zeros((count, length), "int32")
    weights = np.zeros((count, length), "float32")
    weights[:, -QUESTIONS:] = 1.0
    rows = np.arange(count)[:, None]
    keys = _distinct(rng, count, KEYS, PAIRS) + 1  # [n, P]
    places = _distinct(rng, count, SPAN, PAIRS)
    values = rng.integers(0, VALUES, (count, PAIRS))
    ids[rows, places, 0] = keys
    ids[rows, places, 1] = values
    asked = rng.integers(0, PAIRS, (count, QUESTIONS))
    ids[:, -QUESTIONS:, 0] = np.take_along_axis(keys, asked, axis=1)
    ids[:, -QUESTIONS:, 1] = VALUES
    targets[:, -QUESTIONS:] = np.take_along_axis(values, asked, axis=1)
    return ids, targets, weights


def copy_data(count, distance, rng):
    """Sequences, targets and weights of the copy task.

    Args:
        count: Number of sequences.
        distance: Distance of a symbol from its first occurrence, in tokens.
        rng: `numpy.random.Generator`.

    Returns:
        Ids `[count, L]` (symbols, then kinds of noise, then the mark that
        stands before the passage, both times), targets `[count, L]` and
        weights, 1 where the passage is repeated, and 0.
    """
    mark = SYMBOLS + NOISE
    passage = _distinct(rng, count, SYMBOLS, PASSAGE)
    marked = np.concatenate([np.full((count, 1), mark), passage], axis=1)
    noise = SYMBOLS + rng.integers(
        0, NOISE, (count, distance - marked.shape[1])
    )
    ids = np.concatenate([marked, noise, marked], axis=1).astype("int32")
    targets = np.roll(ids, -1, axis=1)
    weights = np.zeros(ids.shape, "float32")
    weights[:, -PASSAGE - 1 : -1] = 1.0
    return ids, targets, weights


def _distinct(rng, count, high, size):
    """`[count, size]` integers below `high`, different within each row."""
    return np.argsort(rng.random((count, high)), axis=1)[:, :size]


def build_model(task, variant, seed, options):
    """A causal model of ids with rotary blocks, and logits for each token."""
    width = options.width
    if task == "recall":
        ids = keras.Input((None, 2), dtype="int32")
        embedding = layers.Embedding
        x = embedding(KEYS + 1, width)(ids[:, :, 0])
        x = x + embedding(VALUES + 1, width)(ids[:, :, 1])
        classes = VALUES
    else:
        classes = 257 if task.startswith("text") else SYMBOLS + NOISE + 1
        ids = keras.Input((None,), dtype="int32")
        x = layers.Embedding(classes, width)(ids)
    for index in range(options.num_layers):
        x = keras_performer.PerformerBlock(
            options.num_heads,
            4 * width,
            causal=True,
            rotary=True,
            seed=seed + index,
            **vars(variant),
        )(x)
    x = layers.LayerNormalization()(x)
    return keras.Model(ids, layers.Dense(classes)(x))


class Curve(keras.callbacks.Callback):
    """Keeps the validation metric of each epoch."""

    def __init__(self, metric):
        super().__init__()
        self.metric = metric
        self.values = []

    def on_epoch_end(self, epoch, logs=None):
        self.values.append(float(logs["val_" + self.metric]))


def run_generated(task, variant, seed, options):
    """Trains on generated sequences; accuracy on new ones, per checkpoint."""
    import tensorflow as tf

    make = {"recall": recall_data, "copy": copy_data}[task]

    def dataset(count, seed):
        arrays = make(count, options.distance, np.random.default_rng(seed))
        data = tf.data.Dataset.from_tensor_slices(arrays)
        return data.batch(options.batch_size, drop_remainder=True)

    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    return _train(
        build_model(task, variant, seed, options),
        dataset(options.steps * options.batch_size, seed),
        dataset(VALIDATION_SEQUENCES, 10**6),
        metric,
        options,
    )


def run_text(task, variant, seed, options):
    """Trains on PG-19; bits per byte of the validation, per checkpoint."""
    from examples.pg19 import config as pg19_config
    from examples.pg19 import data
    from examples.pg19 import evaluate

    length = int(task.removeprefix("text_"))
    config = pg19_config.Config(
        sequence_length=length,
        batch_size=max(1, options.tokens // length),
        seed=seed,
        validation_batches=max(1, VALIDATION_TOKENS // options.tokens),
    )
    tokenizer = data.ByteTokenizer()
    return _train(
        build_model(task, variant, seed, options),
        data.training_dataset(
            data.load(options.data_dir, "train"), tokenizer, config
        ),
        data.validation_dataset(
            data.load(options.data_dir, "validation"), tokenizer, config
        ),
        evaluate.BitsPerByte(tokenizer.bytes_per_token),
        options,
    )


def _train(model, training, validation, metric, options):
    model.compile(
        common.make_optimizer(
            options.learning_rate,
            options.steps // 20,
            options.steps,
            0.0,
            1.0,
        ),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=[metric],
        jit_compile=True,
    )
    curve = Curve(metric.name)
    model.fit(
        training,
        epochs=options.checkpoints,
        steps_per_epoch=options.steps // options.checkpoints,
        validation_data=validation,
        callbacks=[curve],
        shuffle=False,
        verbose=2,
    )
    return curve.values


def read_results(path):
    """Finished runs: dicts with `task`, `variant`, `seed`, `curve`, ..."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def table(results):
    """The last checkpoints as a Markdown table: mean and range over seeds."""
    cells = collections.defaultdict(list)
    for run in results:
        cells[run["variant"], run["column"]].append(run["curve"][-1])
    columns = sorted({column for _, column in cells})
    rows = list(dict.fromkeys(variant for variant, _ in cells))
    lines = [
        "| attention | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in rows:
        texts = [_cell(cells.get((row, column))) for column in columns]
        lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _cell(values):
    if not values:
        return ""
    text = f"{np.mean(values):.3f}"
    if len(values) > 1:
        text += f" ({min(values):.3f} to {max(values):.3f})"
    return text


def draw(results, path):
    """The curves of all runs, one picture for each column of the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = sorted({run["column"] for run in results})
    names = list(dict.fromkeys(run["variant"] for run in results))
    across = min(4, len(columns))
    down = -(-len(columns) // across)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(5 * across, 4.5 * down),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(columns) :]:
        axis.set_axis_off()
    colours = plt.get_cmap("tab20").colors
    lines = {}
    for axis, column in zip(axes.flat, columns):
        for run in results:
            if run["column"] != column:
                continue
            curve = run["curve"]
            steps = np.arange(1, len(curve) + 1) * run["steps"] / len(curve)
            colour = colours[names.index(run["variant"]) % len(colours)]
            (lines[run["variant"]],) = axis.plot(steps, curve, color=colour)
        text = column.startswith("text")
        axis.set_title(column)
        axis.set_xlabel("training steps")
        axis.set_ylabel("bits per byte" if text else "accuracy")
        axis.grid(alpha=0.3)
    figure.legend(
        [lines[name] for name in names], names, loc="outside right upper"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def define_flags(flag_values=flags.FLAGS):
    """The command's flags."""
    for define, name, default, text in (
        (flags.DEFINE_list, "tasks", ["recall", "copy"], f"Of {TASKS}."),
        (flags.DEFINE_list, "variants", None, "Kinds of attention; all."),
        (flags.DEFINE_integer, "seeds", 1, "Runs of each, with seed 0, 1..."),
        (flags.DEFINE_string, "output_dir", None, "Folder of the results."),
        (flags.DEFINE_string, "data_dir", None, "PG-19, for text."),
        (flags.DEFINE_integer, "steps", 400, "Training steps."),
        (flags.DEFINE_integer, "checkpoints", 4, "Validations; divides."),
        (flags.DEFINE_integer, "distance", 256, "Tokens, recall and copy."),
        (flags.DEFINE_integer, "batch_size", 16, "Sequences, same tasks."),
        (flags.DEFINE_integer, "tokens", 4096, "Tokens in a step, text."),
        (flags.DEFINE_integer, "window", 32, "W of the local window."),
        (flags.DEFINE_integer, "num_features", 128, "M."),
        (flags.DEFINE_integer, "num_layers", 2, "Blocks."),
        (flags.DEFINE_integer, "num_heads", 2, "Heads."),
        (flags.DEFINE_integer, "width", 64, "Width of the model."),
        (flags.DEFINE_float, "learning_rate", 3e-3, "Peak of AdamW."),
    ):
        define(name, default, text, flag_values=flag_values)
    flags.mark_flag_as_required("output_dir", flag_values=flag_values)


def main(options=flags.FLAGS):
    """Runs what is missing of the grid."""
    kinds = variants(options.window, options.num_features)
    names = options.variants or list(kinds)
    for name, given, known in (
        ("tasks", options.tasks, TASKS),
        ("variants", names, list(kinds)),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise common.UserError(
                f"--{name} expects some of {known}. Received: {unknown}"
            )
    if options.steps % options.checkpoints:
        raise common.UserError(
            f"--checkpoints={options.checkpoints} must divide "
            f"--steps={options.steps}."
        )
    os.makedirs(options.output_dir, exist_ok=True)
    path = os.path.join(options.output_dir, "results.jsonl")
    grid = [
        (seed, task, name)
        for seed in range(options.seeds)
        for task in options.tasks
        for name in names
    ]
    same = {key: options[key].value for key in SETTINGS}

    def comparable():
        """Finished runs of these settings; others are kept, not shown."""
        return [
            run
            for run in read_results(path)
            if same.items() <= run.items()
            and run.get("tokens", options.tokens) == options.tokens
        ]

    for number, (seed, task, name) in enumerate(grid, start=1):
        text = task.startswith("text")
        size = options.tokens if text else options.distance
        settings = {
            "column": task if text else f"{task} over {size}",
            "variant": name,
            "seed": seed,
            "tokens" if text else "distance": size,
            **same,
        }
        done = read_results(path)
        if any(settings.items() <= run.items() for run in done):
            continue
        print(f"[{number}/{len(grid)}] {task}, {name}, seed {seed}")
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        start = time.process_time()
        run = run_text if text else run_generated
        curve = run(task, kinds[name], seed, options)
        settings["cpu_seconds"] = round(time.process_time() - start)
        settings["curve"] = curve
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(settings) + "\n")
        done = comparable()
        with open(
            os.path.join(options.output_dir, "table.md"), "w", encoding="utf-8"
        ) as file:
            file.write(table(done))
        draw(done, os.path.join(options.output_dir, "far_field.png"))
    print(table(comparable()))


if __name__ == "__main__":
    define_flags()
    common.run(main)
