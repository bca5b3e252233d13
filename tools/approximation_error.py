r"""Error of attention by random features against their number.

Figure 4 of the Performer article (https://arxiv.org/abs/2009.14794), with the
estimators since: the mean squared error of the attention output against exact
softmax attention, for growing numbers of features, mean and standard error
over draws.

    python -m tools.approximation_error --output_dir=/tmp/approximation

By default queries, keys and values are Gaussian, of length 4,096 and key_dim
16. With `--model` and `--text` they are those of a saved language model of
bytes (`examples.pg19`) on a text, per head, and the errors are means over
layers and heads. Attention is bidirectional and without a window in both, so
that nothing but the estimator is measured.

`OUTPUT_DIR` receives `errors.csv`, `table.md` and `approximation_error.png`.
"""

import csv
import os

import keras
import numpy as np
from absl import flags
from keras import ops

from examples import common
from keras_performer import feature_maps
from keras_performer import ops as attention_ops


def estimators():
    """All estimators, by name."""
    plus = feature_maps.FavorPlus
    optimal = feature_maps.FavorPlusPlus
    return {
        "trigonometric iid": feature_maps.TrigonometricFeatures(
            orthogonal=False
        ),
        "trigonometric orthogonal": feature_maps.TrigonometricFeatures(),
        "positive iid": plus(antithetic=False, orthogonal=False),
        "positive orthogonal": plus(antithetic=False),
        "positive simplex": plus(antithetic=False, simplex=True),
        "positive orthogonal antithetic (favor+)": plus(),
        "positive simplex antithetic": plus(simplex=True),
        "regularized antithetic": plus(regularized=True),
        "favor++ iid": optimal(antithetic=False, orthogonal=False),
        "favor++ orthogonal": optimal(antithetic=False),
        "favor++ orthogonal antithetic (favor++)": optimal(),
        "favor++ simplex antithetic": optimal(simplex=True),
        "favor# (orthogonal antithetic)": feature_maps.FavorSharp(),
    }


def gaussian_inputs(length, dim, scale, seed):
    """Queries and keys `N(0, scale^2)`, values `N(0, 1)`: one head each."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(3, 1, length, 1, dim)).astype("float32")
    return [(q * np.float32(scale), k * np.float32(scale), v)]


def model_inputs(model_path, text_path, length):
    """Queries, keys and values of a language model of bytes on a text."""
    from keras_performer.layers import PerformerAttention

    try:
        model = keras.models.load_model(model_path, compile=False)
        with open(text_path, "rb") as file:
            text = file.read(length)
    except (OSError, ValueError) as error:
        raise common.UserError(str(error)) from None
    if len(text) < length:
        raise common.UserError(
            f"--text={text_path} has {len(text)} bytes, expected at least "
            f"--length={length}."
        )
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, PerformerAttention)
    ]
    if not layers:
        raise common.UserError(
            f"--model={model_path} has no PerformerAttention."
        )
    calls = []
    for layer in layers:
        layer._probe = calls.append
    try:
        model(np.frombuffer(text, "uint8").astype("int32")[None] + 1)
    finally:
        for layer in layers:
            layer._probe = None
    return [
        tuple(ops.convert_to_numpy(x)[:, :, h : h + 1] for x in call[:3])
        for call in calls
        for h in range(call[0].shape[2])
    ]


def adapted_weights(feature_map, query, key, num_features):
    """The weights that a layer would have after `calibrate`."""
    heads, dim = query.shape[2:]
    specs = feature_map.weight_specs(heads, num_features, dim)
    weights = {name: np.zeros(spec.shape) for name, spec in specs.items()}
    if feature_map.statistics_width(dim):
        means = [
            ops.mean(feature_map.observe(x), axis=(0, 1)) for x in (query, key)
        ]
        weights.update(feature_map.adapt(*means, weights))
    return weights


def measure(feature_map, inputs, num_features, draws, tick):
    """Mean squared errors of single draws: a list of `draws` floats.

    Trigonometric features may divide by almost 0; such a draw is reported
    as it is.
    """
    errors = np.zeros(draws)
    for q, k, v, exact in inputs:
        size = np.float32(q.shape[-1] ** -0.25)
        query, key = (ops.convert_to_tensor(x * size) for x in (q, k))
        weights = adapted_weights(feature_map, query, key, num_features)
        for draw in range(draws):
            output = attention_ops.kernel_attention(
                query,
                key,
                ops.convert_to_tensor(v),
                feature_map=feature_map,
                projection=feature_map.draw_projection(
                    num_features, q.shape[-1], seed=draw
                ),
                weights=weights,
            )
            difference = ops.convert_to_numpy(output) - exact
            errors[draw] += np.mean(np.square(difference)) / len(inputs)
            tick()
    return list(errors)


def table(rows, counts):
    """Markdown: an estimator in each row, a number of features a column."""
    lines = [
        "| estimator | " + " | ".join(f"M={m}" for m in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for name in dict.fromkeys(row["estimator"] for row in rows):
        cells = [
            f"{row['mean']:.2e} ± {row['standard_error']:.0e}"
            for row in rows
            if row["estimator"] == name
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows, title, path):
    """The picture: mean squared error against M, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5.5), layout="constrained")
    colours = plt.get_cmap("tab20").colors
    names = dict.fromkeys(row["estimator"] for row in rows)
    for colour, name in zip(colours, names):
        own = [row for row in rows if row["estimator"] == name]
        axis.errorbar(
            [row["num_features"] for row in own],
            [row["mean"] for row in own],
            [row["standard_error"] for row in own],
            color=colour,
            marker="o",
            markersize=3,
            capsize=2,
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("features M")
    axis.set_ylabel("mean squared error of the attention output")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def define_flags(flag_values=flags.FLAGS):
    """The command's flags."""
    for define, name, default, text in (
        (flags.DEFINE_string, "output_dir", None, "Folder of the results."),
        (flags.DEFINE_integer, "length", 4096, "Tokens, L."),
        (flags.DEFINE_integer, "dim", 16, "key_dim, d, of Gaussian inputs."),
        (flags.DEFINE_float, "scale", 1.0, "Their standard deviation."),
        (flags.DEFINE_integer, "draws", 15, "Projections for each point."),
        (
            flags.DEFINE_list,
            "num_features",
            ["16", "32", "64", "128", "256"],
            "Numbers of features M, even.",
        ),
        (flags.DEFINE_list, "estimators", None, "By name; all."),
        (flags.DEFINE_string, "model", None, "A .keras file, with --text."),
        (flags.DEFINE_string, "text", None, "A text file, with --model."),
    ):
        define(name, default, text, flag_values=flag_values)
    flags.mark_flag_as_required("output_dir", flag_values=flag_values)


def main(options=flags.FLAGS):
    """Measures, and writes the table and the picture."""
    known = estimators()
    names = options.estimators or list(known)
    if not set(names) <= set(known):
        raise common.UserError(
            f"--estimators expects some of {list(known)}. Received: {names}"
        )
    if (options.model is None) != (options.text is None):
        raise common.UserError("--model and --text belong together.")
    try:
        counts = [int(m) for m in options.num_features]
    except ValueError:
        counts = [0]
    if not counts or not all(m > 0 and m % 2 == 0 for m in counts):
        raise common.UserError(
            "--num_features expects even numbers. Received: "
            f"{options.num_features}"
        )
    for name, least in (("draws", 1), ("length", 1), ("dim", 2)):
        if getattr(options, name) < least:
            raise common.UserError(
                f"--{name} expects an integer of at least {least}. Received: "
                f"{getattr(options, name)}"
            )
    if options.model is not None:
        inputs = model_inputs(options.model, options.text, options.length)
        title = f"a trained model, L={options.length}"
    else:
        inputs = gaussian_inputs(
            options.length, options.dim, options.scale, seed=0
        )
        title = (
            f"L={options.length}, d={options.dim}, "
            f"N(0, {options.scale:g}$^2$), {options.draws} draws"
        )
    inputs = [
        (q, k, v, ops.convert_to_numpy(attention_ops.exact_attention(q, k, v)))
        for q, k, v in inputs
    ]
    os.makedirs(options.output_dir, exist_ok=True)
    bar = keras.utils.Progbar(
        len(names) * len(counts) * options.draws * len(inputs),
        unit_name="draw",
    )
    rows = []
    for name in names:
        for m in counts:
            errors = measure(
                known[name], inputs, m, options.draws, lambda: bar.add(1)
            )
            spread = np.std(errors, ddof=1) if len(errors) > 1 else 0.0
            rows.append(
                {
                    "estimator": name,
                    "num_features": m,
                    "mean": np.mean(errors),
                    "standard_error": spread / np.sqrt(len(errors)),
                }
            )
    folder = options.output_dir
    with open(
        os.path.join(folder, "errors.csv"), "w", encoding="utf-8", newline=""
    ) as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with open(
        os.path.join(folder, "table.md"), "w", encoding="utf-8"
    ) as file:
        file.write(table(rows, counts))
    draw(rows, title, os.path.join(folder, "approximation_error.png"))
    print(table(rows, counts))


if __name__ == "__main__":
    define_flags()
    common.run(main)
