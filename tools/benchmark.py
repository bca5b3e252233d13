r"""Measures time and memory, as ratios against others in the same run.

    python -m tools.benchmark --output_dir=DIR
    python -m tools.benchmark --output_dir=DIR --quick
    python -m tools.benchmark --output_dir=DIR --merge=RUN1,RUN2,RUN3

`--levels=op` measures attention alone, forward and forward+gradient, causal
(pure, and with the default local window) and bidirectional, against

- the *floor*: the time of as many multiply-adds as the method needs in one
  large matrix product, plus that of as many exponentials, both measured in the
  same round (`work` says how many);
- exact attention, `keras.ops.dot_product_attention`, which is what
  `keras.layers.MultiHeadAttention` computes;
- attention that returns the values;
- where they are installed, `performer-pytorch` (without XLA, and without
  windows) and the `KernelAttention` of `tf-models-official` (bidirectional; in
  its causal form it sees a few chunks only), through their own functions.
  `pip install performer-pytorch`; `pip install --no-deps tf-models-official
  tf-keras` and what that asks for.

`--levels=parts` tells what the time of the forward pass, compiled by XLA, goes
to: its products as one large product, and as the chunks have them, and its
exponentials; what is left are passes over features and weights (maxima,
differences, sums, masks).

`--levels=model` measures one `train_on_batch` of whole models, batch 1, each
in a process of its own that may reserve nine tenths of the machine's memory,
with its peak resident memory, against the same model with exact attention and
with attention that returns the values. Times are medians of each process.

`--levels=decode` measures one token of those models as `generate` makes it,
causal, after texts of several lengths, against running the model on the whole
text for it.

All contenders of a configuration take turns, `--repeats` times; a ratio is
the median of the ratios of single rounds. `OUTPUT_DIR` receives
`benchmark.json`, `benchmark.csv`, `table.md` and, of the models,
`benchmark.png`, as Figure 3 of https://arxiv.org/abs/2009.14794. `--merge`
measures nothing: it reads several runs and writes the medians of their medians.
"""

import contextlib
import csv
import functools
import gc
import io
import itertools
import json
import os
import subprocess
import sys
import time

import keras
import numpy as np
from absl import flags

import keras_performer
from examples import common
from keras_performer import feature_maps
from keras_performer import ops as attention_ops
from keras_performer.models import generation

LEVELS = ("op", "parts", "model", "decode")
KINDS = ("causal", "window", "bidirectional")
# (heads, layers, d_ff, width): the article's, regular and small.
MODELS = {"regular": (8, 6, 2048, 512), "small": (1, 6, 64, 64)}
LENGTHS = tuple(2**n for n in range(8, 17))
DECODE_LENGTHS = (1024, 4096, 65536)
DECODE_TOKENS = 64  # of which the mean is one measurement
WINDOW = 128
CHUNK = 128
# A contender that takes longer than this is measured once.
PATIENCE = 20.0
OURS = "keras-performer"
FLOOR = "floor"


def work(kind, gradient, dim, num_features):
    """Multiply-adds and exponentials that a token and head need.

    Counted are the products that the chunked algorithm cannot do without,
    antithetic pairs sharing one projection, and with the gradient those of
    computing features, near weights and sums anew. Exponentials: one for each
    feature of a query and of a key, and one for each near weight of a window.

    Args:
        kind: One of `KINDS`.
        gradient: Whether the gradient is computed as well.
        dim: Width of queries, keys and values, D.
        num_features: M.

    Returns:
        Two integers.
    """
    m, d, f = num_features, dim, dim + 1
    project = d * m // 2  # of a query or of a key
    far = m * f  # one product with the sums
    near, width = {
        "causal": (CHUNK, m),
        "window": (2 * WINDOW, d),
        "bidirectional": (0, 0),
    }[kind]
    scores, read = near * width, near * f
    products = 2 * project + 2 * far + scores + read
    exponentials = 2 * m + (near if kind == "window" else 0)
    if gradient:
        # Anew: projections, in both passes if causal, as the sums are formed
        # once more; the near scores once, and where they are made of features
        # the gradient of the near weights in both passes. Then the products'
        # own gradients, two for each.
        passes = 1 if kind == "bidirectional" else 2
        again = 2 * project * passes + scores
        again += 0 if kind == "bidirectional" else far
        again += read if kind == "causal" else 0
        own = 2 * project + 4 * far + 2 * scores + 2 * read
        products += again + own
        exponentials += passes * 2 * m + (near if kind == "window" else 0)
    return products, exponentials


class Unit:
    """Seconds for one multiply-add and for one exponential, measured."""

    # The exponentials of a chunk stay in a cache: so do these.
    SIDE, COUNT, TIMES = 2048, 2**16, 64

    def __init__(self):
        import tensorflow as tf

        matrix = tf.random.normal((self.SIDE, self.SIDE))
        vector = -tf.random.uniform((self.COUNT,))

        def multiply(matrix):
            return tf.matmul(matrix, matrix)[0, 0]

        def exponentials(x):
            # Each from the last: no two are computed at once, or not at all.
            for _ in tf.range(self.TIMES):
                x = -tf.exp(x)
            return x[0]

        self.multiply = functools.partial(tf.function(multiply), matrix)
        self.exp = functools.partial(
            tf.function(exponentials, jit_compile=True), vector
        )

    def measure(self):
        product, exponential = timed(self.multiply), timed(self.exp)
        return (
            product / self.SIDE**3,
            exponential / (self.COUNT * self.TIMES),
        )


def timed(function):
    """Seconds until the result, a scalar or nothing, is there."""
    start = time.perf_counter()
    result = function()
    finish = getattr(result, "numpy", None)
    if finish is not None:
        finish()
    return time.perf_counter() - start


def tensorflow_run(attend, arrays, gradient, jit_compile):
    """A function without arguments that runs `attend` on the arrays."""
    import tensorflow as tf

    tensors = [tf.constant(x) for x in arrays]

    def forward(*tensors):
        # A scalar, as an array would be copied to be read.
        return tf.reduce_sum(attend(*tensors))

    def both(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            loss = tf.reduce_sum(tf.square(attend(*tensors)))
        return tf.add_n(
            [tf.reduce_sum(g) for g in tape.gradient(loss, tensors)]
        )

    function = tf.function(
        both if gradient else forward, jit_compile=jit_compile
    )
    return lambda: function(*tensors)


def ours(kind, case):
    feature_map = feature_maps.get("favor+")
    projection = feature_map.draw_projection(
        case["num_features"], case["dim"], seed=1
    )
    options = {"feature_map": feature_map, "projection": projection}
    attend = attention_ops.kernel_attention
    if kind != "bidirectional":
        attend = attention_ops.causal_kernel_attention
        options["local_window"] = WINDOW if kind == "window" else 0
    attend = functools.partial(attend, **options)
    return tensorflow_run(
        attend, case["arrays"], case["gradient"], case["jit_compile"]
    )


def exact(kind, case):
    if not _fits(12.0 * case["heads"] * case["length"] ** 2):
        return None  # scores, weights and their gradient
    attend = functools.partial(
        attention_ops.exact_attention, causal=kind != "bidirectional"
    )
    return tensorflow_run(
        attend, case["arrays"], case["gradient"], case["jit_compile"]
    )


def returns_values(kind, case):
    return tensorflow_run(
        _return_values, case["arrays"], case["gradient"], case["jit_compile"]
    )


def performer_pytorch(kind, case):
    if kind == "window":
        return None
    try:
        import torch
        from performer_pytorch import FastAttention
    except ImportError:
        return None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with contextlib.redirect_stdout(io.StringIO()):  # tells of its CUDA code
        attend = FastAttention(
            case["dim"], case["num_features"], causal=kind == "causal"
        )
    # It scales queries and keys itself, as ours were before.
    size = case["dim"] ** 0.25
    q, k, v = (
        torch.tensor(np.swapaxes(x, 1, 2) * scale)
        for x, scale in zip(case["arrays"], (size, size, 1.0))
    )

    def forward():
        with torch.no_grad():
            return attend(q, k, v).sum().item()

    def both():
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        attend(*tensors).square().sum().backward()
        return sum(x.grad.sum() for x in tensors).item()

    return both if case["gradient"] else forward


def kernel_attention(kind, case):
    if kind != "bidirectional":
        return None
    try:
        from official.nlp.modeling.layers.kernel_attention import (
            KernelAttention,
        )
    except ImportError:
        return None
    layer = KernelAttention(
        num_heads=case["heads"],
        key_dim=case["dim"],
        num_random_features=case["num_features"],
        scale=1.0,
    )
    attend = functools.partial(
        layer._compute_attention,
        feature_transform="exp",
        is_short_seq=False,
    )
    return tensorflow_run(
        attend, case["arrays"], case["gradient"], case["jit_compile"]
    )


CONTENDERS = {
    OURS: ours,
    "returns the values": returns_values,
    "exact": exact,
    "performer-pytorch": performer_pytorch,
    "KernelAttention": kernel_attention,
}
# These are left out where they cannot run; others "do not fit".
OPTIONAL = ("performer-pytorch", "KernelAttention")


def _fits(num_bytes):
    return num_bytes < 0.6 * _total_memory()


def _total_memory():
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_op(kind, gradient, jit_compile, length, unit, options):
    """Rows of one configuration: a dict for each contender."""
    contenders = [name for name in CONTENDERS if name in options.contenders]
    rng = np.random.default_rng(0)
    size = (3, 1, length, options.heads, options.dim)
    case = {
        "arrays": list(0.35 * rng.normal(size=size).astype("float32")),
        "gradient": gradient,
        "jit_compile": jit_compile,
        "length": length,
        "heads": options.heads,
        "dim": options.dim,
        "num_features": options.num_features,
    }
    runs = {}
    for name in contenders:
        run = CONTENDERS[name](kind, case)
        if run is not None:
            runs[name] = run
    seconds = {name: [] for name in (*contenders, FLOOR)}
    slow = set()
    for name, run in runs.items():
        timed(run)  # traces and compiles
        if timed(run) > PATIENCE:
            slow.add(name)
    products, exponentials = work(
        kind, gradient, options.dim, options.num_features
    )
    for turn in range(options.repeats):
        product, exponential = unit.measure()
        floor = products * product + exponentials * exponential
        seconds[FLOOR].append(floor * length * options.heads)
        for name, run in runs.items():
            if turn and name in slow:
                seconds[name].append(seconds[name][0])
            else:
                seconds[name].append(timed(run))
    del runs
    gc.collect()
    common_fields = {
        "level": "op",
        "kind": kind,
        "what": "forward+gradient" if gradient else "forward",
        "jit_compile": jit_compile,
        "length": length,
    }
    return [
        {
            **common_fields,
            "contender": name,
            **(_statistics(times, seconds[OURS]) if times else NOT_FITTING),
        }
        for name, times in seconds.items()
        if times or name not in OPTIONAL
    ]


def chunk_products(kind, heads, dim, num_features):
    """The products of one chunk's forward pass, with their operands' shapes.

    Returns:
        List of `(equation, shape, shape)`.
    """
    h, c, d, m, f = heads, CHUNK, dim, num_features, dim + 1
    project = ("hcd,md->hcm", (h, c, d), (m // 2, d))
    read = ("hcm,hmf->hcf", (h, c, m), (h, m, f))
    add = ("hcm,hcf->hmf", (h, c, m), (h, c, f))
    near, width = {
        "causal": (c, m),
        "window": (2 * WINDOW, d),
        "bidirectional": (0, 0),
    }[kind]
    found = [project, project, read, add]
    if near:
        found += [
            ("hcm,hsm->hcs", (h, c, width), (h, near, width)),
            ("hcs,hsf->hcf", (h, c, near), (h, near, f)),
        ]
    return found


def _looped_product(equation, first, second, count):
    """A function that takes one product `count` times, as a scan does."""
    import tensorflow as tf

    a, b = tf.random.normal((count, *first)), tf.random.normal(second)

    def function(a, b):
        def body(index, last):
            # On the last result: no two are computed at once, or not at all.
            product = tf.einsum(equation, a[index], b + 1e-9 * last)
            return index + 1, product[0, 0, 0]

        _, last = tf.while_loop(
            lambda index, _: index < count,
            body,
            (0, 0.0),
            maximum_iterations=count,
        )
        return last

    return functools.partial(tf.function(function, jit_compile=True), a, b)


def measure_parts(kind, length, unit, options):
    """Rows of one forward pass and of what it is made of."""
    size = (3, 1, length, options.heads, options.dim)
    rng = np.random.default_rng(0)
    case = {
        "arrays": list(0.35 * rng.normal(size=size).astype("float32")),
        "gradient": False,
        "jit_compile": True,
        "dim": options.dim,
        "num_features": options.num_features,
    }
    run = ours(kind, case)
    loops = [
        _looped_product(*product, length // CHUNK)
        for product in chunk_products(
            kind, options.heads, options.dim, options.num_features
        )
    ]
    products, exponentials = work(
        kind, False, options.dim, options.num_features
    )
    seconds = {name: [] for name in (OURS, *PARTS)}
    for loop in (run, *loops):
        timed(loop)  # traces and compiles
    for _ in range(options.repeats):
        product, exponential = unit.measure()
        times = (
            timed(run),
            products * product * length * options.heads,
            sum(timed(loop) for loop in loops),
            exponentials * exponential * length * options.heads,
        )
        for name, value in zip(seconds, times, strict=True):
            seconds[name].append(value)
    return [
        {
            "level": "parts",
            "kind": kind,
            "what": "forward",
            "jit_compile": True,
            "length": length,
            "contender": name,
            **_statistics(times, seconds[OURS]),
        }
        for name, times in seconds.items()
    ]


PARTS = ("products at once", "products by chunks", "exponentials")
NOT_FITTING = {"seconds": None, "ratio": None}


def _statistics(seconds, ours):
    """Medians, and the median of the rounds' ratios to ours."""
    return {
        "seconds": float(np.median(seconds)),
        "least": float(np.min(seconds)),
        "most": float(np.max(seconds)),
        "ratio": float(np.median(np.divide(seconds, ours))),
    }


def build_model(sizes, attention, causal, length):
    """A language model of bytes; `attention` as in `MODEL_CONTENDERS`."""
    heads, layers, d_ff, width = sizes
    ids = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(256, width)(ids)
    for _ in range(layers):
        block = keras_performer.PerformerBlock(
            heads,
            d_ff,
            causal=causal,
            feature_map="exact" if attention == "exact" else "favor+",
            local_window=0 if attention == "pure" else None,
        )
        x = block(x)
        if attention == "returns the values":
            block.attention._attend = _return_values
    model = keras.Model(ids, keras.layers.Dense(256)(x))
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )
    return model


def _return_values(query, key, value, mask=None, causal=None):
    """Mixes no tokens. All three projections stay, and get gradients."""
    return value + 1e-9 * (query + key)


MODEL_CONTENDERS = (OURS, "pure", "returns the values", "exact")
EVERYONE = tuple(dict.fromkeys((*CONTENDERS, *MODEL_CONTENDERS)))


def run_child(child):
    """Measures one model, in this process; prints a line of JSON."""
    sizes = MODELS[child["model"]]
    model = build_model(
        sizes, child["contender"], child["causal"], child["length"]
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (1, child["length"])).astype("int32")
    first = timed(lambda: model.train_on_batch(ids, ids))
    repeats = 1 if first > 10 * PATIENCE else child["repeats"]
    seconds = [
        timed(lambda: model.train_on_batch(ids, ids)) for _ in range(repeats)
    ]
    print(json.dumps({"seconds": seconds, "memory": peak_memory()}))


def limit_memory():
    """Lets this process reserve nine tenths of the machine's memory (Linux).

    What does not fit then fails here, before the kernel chooses among all
    processes of the machine which one to kill.
    """
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(0.9 * _total_memory())
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def peak_memory():
    """Peak resident bytes of this process (Linux).

    Not `getrusage`, where a child begins with the peak of its parent.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure_model(name, causal, length, options):
    """Rows of one configuration, each contender in processes of its own."""
    rows = []
    for contender in MODEL_CONTENDERS:
        if contender not in options.contenders:
            continue
        if contender == "pure" and not causal:
            continue
        child = {
            "model": name,
            "contender": contender,
            "causal": causal,
            "length": length,
            "repeats": options.repeats,
        }
        run = subprocess.run(
            [sys.executable, "-m", "tools.benchmark", "--output_dir=-"]
            + [f"--child={json.dumps(child)}"],
            capture_output=True,
            text=True,
            check=False,
        )
        row = {
            "level": "model",
            "kind": f"{name}, {'causal' if causal else 'bidirectional'}",
            "what": "training step",
            "jit_compile": True,
            "length": length,
            "contender": contender,
        }
        if run.returncode == 0:
            found = json.loads(run.stdout.splitlines()[-1])
            row.update(_statistics(found["seconds"], [1.0]))
            row["memory"] = found["memory"]
        elif _out_of_memory(run):
            row.update(NOT_FITTING)
        else:
            raise RuntimeError(run.stderr[-4000:])
        rows.append(row)
    base = rows[0]["seconds"]
    for row in rows:
        both = base and row["seconds"]
        row["ratio"] = row["seconds"] / base if both else None
    return rows


def measure_decoding(name, lengths, options):
    """Rows of one model: a token after texts of these lengths, in turns."""
    heads, layers, d_ff, width = MODELS[name]
    model = keras_performer.PerformerLM(
        256, layers, heads, width, d_ff, max(lengths)
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (1, max(lengths))).astype("int32")
    runs = {}
    for length in lengths:
        runs[length, OURS] = _tokens(model, ids[:, :length])
        runs[length, AGAIN] = _whole_text(model, ids[:, :length])
    seconds = {key: [] for key in runs}
    for run in runs.values():
        timed(run)  # traces and compiles
    for _ in range(options.repeats):
        for (length, contender), run in runs.items():
            tokens = DECODE_TOKENS if contender == OURS else 1
            seconds[length, contender].append(timed(run) / tokens)
    for length in lengths:
        first = seconds[min(lengths), OURS]
        seconds[length, f"a token after {min(lengths):,}"] = first
    return [
        {
            "level": "decode",
            "kind": f"{name}, causal",
            "what": "a token",
            "jit_compile": True,
            "length": length,
            "contender": contender,
            **_statistics(times, seconds[length, OURS]),
        }
        for (length, contender), times in seconds.items()
    ]


def _tokens(model, ids):
    """A function that makes `DECODE_TOKENS` tokens after a text."""
    last, state = model._take_in(list(ids))
    loop = model._compiled("continue_state")
    draw = generation.draw_options(seed=0)
    count = DECODE_TOKENS
    return lambda: loop(last, state, np.int32(count), count, None, draw)[0, 0]


AGAIN = "the whole text again"


def _whole_text(model, ids):
    import tensorflow as tf

    function = tf.function(
        lambda ids: tf.reduce_sum(model(ids)[:, -1]), jit_compile=True
    )
    return functools.partial(function, tf.constant(ids))


def _out_of_memory(run):
    words = ("ResourceExhausted", "bad_alloc", "MemoryError", "RESOURCE_EX")
    return run.returncode < 0 or any(word in run.stderr for word in words)


def table(rows):
    """Markdown: a configuration in each row, ratios first."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    others = [name for name in names if name != OURS]
    lines = [
        f"| what | L | {OURS} | "
        + " | ".join(map(_column, others))
        + " |",
        "|---" * (len(others) + 3) + "|",
    ]
    groups = {}
    for row in rows:
        compiled = "" if row["jit_compile"] else ", without XLA"
        key = (f"{row['kind']}, {row['what']}{compiled}", row["length"])
        groups.setdefault(key, {})[row["contender"]] = row
    for (what, length), group in groups.items():
        cells = [what, f"{length:,}", _seconds_cell(group.get(OURS))]
        cells += [_ratio_cell(group.get(name), group) for name in others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _column(name):
    return "over the floor" if name == FLOOR else f"{name}, times as long"


def _seconds_cell(row):
    if row is None:
        return ""
    if row["seconds"] is None:
        return "does not fit"
    unit, scale = ("ms", 1e3) if row["level"] == "decode" else ("s", 1.0)
    text = f"{row['seconds'] * scale:.3f} {unit}"
    if row.get("least") is not None:
        least, most = row["least"] * scale, row["most"] * scale
        text += f" ({least:.3f} to {most:.3f})"
    if row.get("memory"):
        text += f", {row['memory'] / 2**30:.2f} GiB"
    return text


def _ratio_cell(row, group):
    if row is None:
        return ""
    if row["seconds"] is None:
        return "does not fit"
    if row["ratio"] is None:
        return "fits"
    if row["contender"] == FLOOR:
        return f"{1 / row['ratio']:.2f}"
    text = f"{row['ratio']:.2f}"
    if row.get("memory"):
        text += f", memory {row['memory'] / group[OURS]['memory']:.2f}"
    return text


def merge(runs):
    """Rows of medians over several runs of the same configurations.

    Args:
        runs: list of lists of rows. What one run has measured and another
            has not is merged from those that have.
    """
    key_of = ("level", "kind", "what", "jit_compile", "length", "contender")
    groups = {}
    for row in itertools.chain(*runs):
        key = tuple(row[name] for name in key_of)
        groups.setdefault(key, []).append(row)
    rows = []
    for group in groups.values():
        row = dict(group[0])
        for name in ("seconds", "ratio", "memory"):
            if row.get(name) is not None:
                found = [one[name] for one in group if one[name] is not None]
                row[name] = float(np.median(found))
        if row.get("least") is not None:
            # From the least to the greatest median.
            medians = [one["seconds"] for one in group if one["seconds"]]
            row["least"], row["most"] = min(medians), max(medians)
        rows.append(row)
    # Runs of other lengths may come in any order.
    order = list(dict.fromkeys(_configuration(row) for row in rows))
    return sorted(
        rows, key=lambda row: (order.index(_configuration(row)), row["length"])
    )


def _configuration(row):
    """What a row measures, but for its length."""
    return tuple(row[name] for name in ("level", "kind", "what", "jit_compile"))


def doubling(rows):
    """Lines that tell how many times longer twice the length takes."""
    groups = {}
    for row in rows:
        if row["contender"] == OURS and row["seconds"]:
            if row["level"] in ("op", "model"):
                key = (row["kind"], row["what"], row["jit_compile"])
                groups.setdefault(key, {})[row["length"]] = row["seconds"]
    lines = []
    for (kind, what, compiled), seconds in groups.items():
        found = [
            f"{2 * length:,}: {seconds[2 * length] / seconds[length]:.2f}"
            for length in sorted(seconds)
            if 2 * length in seconds
        ]
        if found:
            suffix = "" if compiled else ", without XLA"
            lines.append(
                f"{kind}, {what}{suffix}: times as long as half the length, "
                + ", ".join(found)
            )
    return lines


def crossover(rows):
    """Lines that tell from which length on exact attention is slower."""
    lines = []
    groups = {}
    for row in rows:
        if row["contender"] == "exact":
            key = (row["kind"], row["what"], row["jit_compile"])
            slower = row["ratio"] is None or row["ratio"] > 1
            groups.setdefault(key, []).append((row["length"], slower))
    for (kind, what, compiled), found in groups.items():
        lengths = [length for length, slower in sorted(found) if slower]
        text = f"from {min(lengths):,}" if lengths else "at no length measured"
        suffix = "" if compiled else ", without XLA"
        lines.append(f"{kind}, {what}{suffix}: exact is slower {text}")
    return lines


def draw(rows, path):
    """Time and memory of the models against length, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, axes = plt.subplots(
        2,
        len(kinds),
        figsize=(5.5 * len(kinds), 8),
        squeeze=False,
        layout="constrained",
    )
    for column, kind in zip(axes.T, kinds):
        own = [row for row in rows if row["kind"] == kind and row["seconds"]]
        for name in dict.fromkeys(row["contender"] for row in own):
            line = [row for row in own if row["contender"] == name]
            lengths = [row["length"] for row in line]
            for axis, value in zip(column, ("seconds", "memory")):
                scale = 1.0 if value == "seconds" else 2.0**-30
                axis.plot(
                    lengths,
                    [row[value] * scale for row in line],
                    marker="o",
                    markersize=3,
                    label=name,
                )
        column[0].set_title(kind)
        for axis, label in zip(column, ("seconds", "peak memory, GiB")):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("length")
            axis.set_ylabel(f"training step, {label}")
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def define_flags(flag_values=flags.FLAGS):
    """The command's flags."""
    for define, name, default, text in (
        (flags.DEFINE_string, "output_dir", None, "Folder of the results."),
        (flags.DEFINE_list, "levels", list(LEVELS), f"Of {LEVELS}."),
        (flags.DEFINE_list, "kinds", list(KINDS), "Of attention."),
        (flags.DEFINE_list, "models", list(MODELS), "Sizes of models."),
        (flags.DEFINE_list, "contenders", list(EVERYONE), f"Of {EVERYONE}."),
        (flags.DEFINE_list, "lengths", None, "Tokens; 256 to 65,536."),
        (flags.DEFINE_list, "jit_compile", ["true", "false"], "XLA, op."),
        (flags.DEFINE_integer, "repeats", 7, "Rounds."),
        (flags.DEFINE_integer, "heads", 8, "H, at the op level."),
        (flags.DEFINE_integer, "dim", 64, "D, at the op level."),
        (flags.DEFINE_integer, "num_features", 256, "M, at the op level."),
        (flags.DEFINE_bool, "quick", False, "Two lengths, 3 rounds."),
        (flags.DEFINE_list, "merge", None, "Folders of runs to merge."),
        (flags.DEFINE_string, "child", None, "Used by the tool itself."),
    ):
        define(name, default, text, flag_values=flag_values)
    flags.mark_flag_as_required("output_dir", flag_values=flag_values)


class _Settings:
    """The flags as they are meant, checked."""

    def __init__(self, options):
        for name, known in (
            ("levels", LEVELS),
            ("kinds", KINDS),
            ("models", tuple(MODELS)),
            ("jit_compile", ("true", "false")),
            ("contenders", EVERYONE),
        ):
            given = getattr(options, name)
            unknown = sorted(set(given) - set(known))
            if unknown:
                raise common.UserError(
                    f"--{name} expects some of {known}. Received: {unknown}"
                )
            setattr(self, name, given)
        if OURS not in self.contenders:
            self.contenders = [OURS, *self.contenders]
        try:
            self.lengths = [int(n) for n in options.lengths or ()]
        except ValueError:
            self.lengths = [0]
        if min(self.lengths, default=1) < 1:
            raise common.UserError(
                "--lengths expects positive integers. Received: "
                f"{options.lengths}"
            )
        self.repeats = options.repeats
        self.heads, self.dim = options.heads, options.dim
        self.num_features = options.num_features
        for name in ("repeats", "heads", "dim", "num_features"):
            if getattr(self, name) < 1:
                raise common.UserError(
                    f"--{name} expects a positive integer. Received: "
                    f"{getattr(self, name)}"
                )
        if options.quick:
            self.repeats = min(3, self.repeats)
        default = (1024, 8192) if options.quick else LENGTHS
        self.decode_lengths = self.lengths or DECODE_LENGTHS
        self.lengths = self.lengths or default
        self.jit_compile = [text == "true" for text in self.jit_compile]

    def jobs(self):
        """Functions of the unit that give rows, with a text for each."""
        if "op" in self.levels:
            for jit_compile in self.jit_compile:
                for kind in self.kinds:
                    for gradient in (False, True):
                        for length in self.lengths:
                            yield functools.partial(
                                measure_op, kind, gradient, jit_compile, length
                            )
        if "parts" in self.levels:
            for kind in self.kinds:
                for length in self.lengths:
                    if length % CHUNK == 0:
                        yield functools.partial(measure_parts, kind, length)
        if "model" in self.levels:
            for name in self.models:
                for causal in (True, False):
                    kind = "causal" if causal else "bidirectional"
                    for length in self.lengths if kind in self.kinds else ():
                        yield lambda unit, options, job=(
                            name, causal, length
                        ): measure_model(*job, options)
        if "decode" in self.levels:
            for name in self.models:
                yield lambda unit, options, job=(
                    name, self.decode_lengths
                ): measure_decoding(*job, options)


def main(options=flags.FLAGS):
    """Measures, and writes the tables and the picture."""
    if options.child is not None:
        limit_memory()
        run_child(json.loads(options.child))
        return
    folder = options.output_dir
    os.makedirs(folder, exist_ok=True)
    if options.merge:
        rows = merge([_read(run) for run in options.merge])
        _write(rows, folder)
        _show(rows)
        return
    settings = _Settings(options)
    jobs = list(settings.jobs())
    bar = keras.utils.Progbar(len(jobs), unit_name="configuration")
    unit = Unit()
    unit.measure()  # traces and compiles
    rows = []
    for job in jobs:
        rows += job(unit, settings)
        bar.add(1)
        _write(rows, folder)
    _show(rows)


def _show(rows, file=None):
    """Tables and what follows from them."""
    for level in dict.fromkeys(row["level"] for row in rows):
        own = [row for row in rows if row["level"] == level]
        print(table(own), file=file)
    print("\n".join(crossover(rows) + doubling(rows)), file=file)


def _read(folder):
    """Rows of an earlier run."""
    path = os.path.join(folder, "benchmark.json")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, json.JSONDecodeError) as error:
        raise common.UserError(f"--merge: {path}: {error}") from None


def _write(rows, folder):
    """All files, anew after each configuration: a long run may be cut."""

    def path(name):
        return os.path.join(folder, name)

    with open(path("benchmark.json"), "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(
        path("benchmark.csv"), "w", encoding="utf-8", newline=""
    ) as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    with open(path("table.md"), "w", encoding="utf-8") as file:
        _show(rows, file)
    models = [row for row in rows if row["level"] == "model"]
    if models:
        draw(models, path("benchmark.png"))


if __name__ == "__main__":
    define_flags()
    common.run(main)
