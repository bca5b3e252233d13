"""Presets of the pipelines: they build, and TPUs take their steps."""

import dataclasses
import importlib
import math
import types

import pytest

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("tensorflow_text", reason="the examples tokenise by it")

from examples import common
from tools import compile_for_tpu

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

TASKS = ("pg19", "imagenet64", "protein")
PRESETS = [(task, name) for task in TASKS for name in ("smoke", "small")]
PAPER = [(task, "paper") for task in TASKS]
# Weights of the article's models, counted by hand in `expected_count`.
VOCABULARIES = {"imagenet64": 256, "protein": 29}


def module(task, name):
    return importlib.import_module(f"examples.{task}.{name}")


def config_of(task, preset, **changes):
    config = module(task, "config").PRESETS[preset]()
    return dataclasses.replace(config, jit_compile=False, **changes)


def build(task, config):
    """The compiled model of a config."""
    train = module(task, "train")
    if task == "pg19":
        size = config.vocabulary_size
        tokenizer = types.SimpleNamespace(bytes_per_token=[1] * size)
        model = train.build_model(config, size)
        metrics = train.metrics(tokenizer)
    else:
        model, metrics = train.build_model(config), train.metrics()
    common.compile_model(model, config, metrics)
    return model


def expected_count(task, config):
    """Trainable weights of a preset, from its sizes alone."""
    d, inner = config.hidden_dim, config.intermediate_dim
    attention = 4 * (d * d + d)
    feedforward = 2 * d * inner + inner + d
    block = attention + feedforward + 4 * d
    vocabulary = VOCABULARIES.get(task) or config.vocabulary_size
    positions = 2 * config.image_size + 3 if task == "imagenet64" else 0
    embeddings = (vocabulary + positions) * d
    return config.num_layers * block + embeddings + 2 * d


@pytest.mark.slow
@pytest.mark.parametrize("task, preset", PRESETS + PAPER)
def test_a_preset_builds_and_has_the_weights_of_its_sizes(task, preset):
    config = config_of(task, preset)
    model = build(task, config)
    count = sum(math.prod(w.shape) for w in model.trainable_weights)
    assert count == expected_count(task, config)


def lowered_step(task, config):
    """StableHLO of all that `fit` does in a step."""
    model = build(task, config)
    model.optimizer.build(model.trainable_variables)
    ids = tf.zeros((config.batch_size, config.sequence_length), tf.int32)
    batch = (ids, ids, tf.ones(ids.shape))
    model._symbolic_build(data_batch=batch)
    return compile_for_tpu.lower(
        lambda x, y, weight: model.train_step((x, y, weight)), *batch
    )


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("task, preset", PRESETS)
def test_the_step_of_a_preset_compiles_for_a_tpu(task, preset):
    text = lowered_step(task, config_of(task, preset))
    for topology in ("v2:2x2x1", "v5e:1x1"):
        assert compile_for_tpu.compile_text(text, topology).fits, topology


# What the READMEs' commands give to a core: of eight, which share a batch, and
# of one that has all of it.
EIGHT, ALONE = ("v2:2x2x1", "v5e:1x1"), ("v5e:1x1",)
LONG = {"sequence_length": 8192, "concatenate": True}
PAPER_STEPS = {
    "pg19": ("pg19", 1, {}, EIGHT),
    "pg19-alone": ("pg19", 8, {}, ALONE),
    "imagenet64": ("imagenet64", 1, {}, EIGHT),
    "imagenet64-alone": ("imagenet64", 8, {}, ALONE),
    "protein": ("protein", 8, {}, EIGHT),
    # For a v2 the compiler takes more memory than 24 GB of this step.
    "protein-long": ("protein", 1, LONG, ALONE),
}


def lowered_paper_step(task, batch_size, changes):
    options = {"dtype_policy": "mixed_bfloat16", **changes}
    config = config_of(task, "paper", batch_size=batch_size, **options)
    return lowered_step(task, config)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize("name", PAPER_STEPS)
def test_the_step_of_the_paper_compiles_for_a_tpu(name):
    *arguments, topologies = PAPER_STEPS[name]
    text = lowered_paper_step(*arguments)
    for topology in topologies:
        assert compile_for_tpu.compile_text(text, topology).fits, topology


@pytest.mark.slow
@pytest.mark.tpu
def test_exact_attention_does_not_fit_where_features_do():
    text = lowered_paper_step("protein", 1, {**LONG, "feature_map": "exact"})
    assert not compile_for_tpu.compile_text(text, "v5e:1x1").fits
