"""Packaging of keras-performer."""

import pathlib

from setuptools import find_packages
from setuptools import setup

HERE = pathlib.Path(__file__).parent

# TensorFlow is an extra, never a requirement: `pip install tensorflow` on a
# TPU machine overwrites the TPU build that is already there, and a JAX user
# does not need it at all.
TENSORFLOW = ["tensorflow>=2.20"]
# Each tensorflow-text release asks for the TensorFlow release of the same
# number, so pip takes the two together.
TEXT = TENSORFLOW + ["tensorflow-text>=2.20"]
EXAMPLES = TEXT + [
    "tensorboard>=2.20",
    "absl-py>=2.1",
    "matplotlib>=3.8",
    "pillow>=10.1",
    # Its wheel holds the photographs of examples/imagenet64.
    "scikit-image>=0.22",
]

setup(
    name="keras-performer",
    version="0.1.0",
    description="Performer (FAVOR+) linear attention as Keras 3 layers.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["keras_performer", "keras_performer.*"]),
    package_data={"keras_performer": ["py.typed"]},
    zip_safe=False,
    # Older releases of Keras load graph code from a `.keras` file without
    # asking (`TFSMLayer` outside the safe mode).
    install_requires=["keras>=3.13.2", "numpy>=1.26"],
    extras_require={
        "tensorflow": TENSORFLOW,
        "text": TEXT,
        # The last TPU build of TensorFlow and the runtime that it was built
        # with: later libtpu releases stop it at import.
        "tpu": ["tensorflow-tpu==2.20.0", "libtpu==0.0.31"],
        "jax": ["jax>=0.5"],
        # The TPU's compiler, which runs on any x86 machine, and the jax whose
        # private parts `tools/compile_for_tpu.py` reaches it through. Its
        # licence is Google Cloud's.
        "tpu-compiler": [
            "jax==0.10.2",
            "jaxlib==0.10.2",
            "libtpu==0.0.52",
        ],
        "examples": EXAMPLES,
        # Only for `--data_dir=tfds:NAME`.
        "tfds": ["tensorflow-datasets>=4.9"],
        "test": EXAMPLES + ["pytest>=8.0", "pytest-xdist>=3.6", "jax==0.10.2"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
