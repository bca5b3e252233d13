"""A part of the tests once more, on JAX.

`KERAS_BACKEND=jax pytest tests/ops tests/layers` runs them all.
"""

import os
import subprocess
import sys

import pytest

ON_JAX = [
    # Causal attention, values and gradients, with a window and a mask.
    "tests/ops/test_linear_attention.py::"
    "test_a_masked_key_is_left_out[favor+-7-None]",
    "tests/ops/test_weighted_maps.py::"
    "test_every_gradient_is_the_oracles[hedgehog-True-5-graph]",
    # Layers: built, saved, fitted; the redraw.
    "tests/layers/test_layer_contract.py::"
    "test_attention_climbs_the_ladder[defaults]",
    "tests/layers/test_layer_contract.py::"
    "test_attention_trains_when_compiled_by_xla[defaults]",
    "tests/layers/test_redraw.py::"
    "test_o36_seven_steps_of_fit_see_three_projections[attention-True]",
    "tests/layers/test_statistics.py::test_calibration_is_one_pass",
    # What is skipped on TensorFlow, as it is about the other backends.
    "tests/layers/test_redraw.py::test_jax_cannot_recompute_what_adapts",
    "tests/test_saving.py::test_other_backends_are_refused",
]


@pytest.mark.tensorflow_only("it is about the other backend")
def test_jax_passes_too():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *ON_JAX],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert f"{len(ON_JAX)} passed" in run.stdout
