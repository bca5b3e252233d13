"""What importing the package needs, and what it leaves alone."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(program, backend, blocked=()):
    """Runs a program in a fresh process; `blocked` modules are not there."""
    settings = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + program],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "backend, blocked, expected",
    [
        ("tensorflow", "keras", "needs Keras 3, which is not installed"),
        ("tensorflow", "tensorflow", "Keras is set to tensorflow"),
        ("jax", "jax", "Keras is set to jax"),
    ],
)
def test_missing_backend_names_the_extra(backend, blocked, expected):
    result = run("import keras_performer", backend, blocked=(blocked,))
    assert result.returncode == 1
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: ")
    assert expected in error
    assert 'pip install "keras-performer[tensorflow]"' in error
    assert 'pip install "keras-performer[jax]"' in error


@pytest.mark.parametrize(
    "backend, blocked", [("torch", ("torch",)), ("numpy", ())]
)
def test_o61_unsupported_backend_is_named(backend, blocked):
    # torch stands for a backend that is not installed, which Keras itself
    # cannot import; numpy for one that runs.
    result = run("import keras_performer", backend, blocked)
    assert result.returncode == 1
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: ")
    assert f"does not support the Keras backend {backend}" in error
    assert "tensorflow, jax" in error


def test_o61_runs_on_jax_without_tensorflow():
    result = run(
        """
import numpy as np
import keras_performer

layer = keras_performer.PerformerAttention(num_heads=2, key_dim=4)
assert layer(np.zeros((1, 5, 8), "float32")).shape == (1, 5, 8)
""",
        "jax",
        blocked=("tensorflow", "tensorflow_text", "matplotlib"),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_import_adds_no_optional_package(backend):
    # TensorFlow and Keras themselves look for jax and matplotlib and load
    # them where installed, so only what the package adds is counted.
    result = run(
        """
import sys
import keras
if keras.config.backend() == "tensorflow":
    import tensorflow
before = set(sys.modules)
import keras_performer
added = {name.partition(".")[0] for name in set(sys.modules) - before}
optional = {"tensorflow", "tensorflow_text", "matplotlib", "jax"}
print(sorted(added & optional - {keras.config.backend()}))
""",
        backend,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
