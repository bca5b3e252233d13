"""What every test starts from: a fresh session, seed and dtype policy."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Where libtpu is installed for its compiler, there is no TPU to run on.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile much and run little: these leave XLA's own passes as they are,
# and LLVM's out, which compiles several times as fast and computes the same.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)

import keras
import pytest

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"

# Replicas need several devices, and the number of logical CPUs can only be
# set before TensorFlow makes its first tensor, so it is set here.
LOGICAL_CPUS = 4
if ON_TENSORFLOW:
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS,
    )
else:
    import jax


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "tensorflow_only(reason): skipped, for that reason, on other backends",
    )
    config.addinivalue_line(
        "markers",
        "one_in(n): of its parametrisations the others of each n are slow",
    )
    if not ON_TENSORFLOW:
        # Eager JAX compiles each loop anew: from here, where it was seen.
        cache = {
            "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        for name, value in cache.items():
            jax.config.update(name, value)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Spreads the parametrisations of a test over the two suites."""
    counts = {}
    for item in items:
        marker = item.get_closest_marker("one_in")
        slow = item.get_closest_marker("slow")
        if marker is not None and slow is None:
            test = item.nodeid.split("[")[0]
            counts[test] = counts.get(test, -1) + 1
            if counts[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def tensorflow_only(request):
    """Skips a test that is marked `tensorflow_only` on other backends."""
    marker = request.node.get_closest_marker("tensorflow_only")
    if marker is not None and not ON_TENSORFLOW:
        # The reason is a required argument: a skip always says why.
        (reason,) = marker.args
        pytest.skip(reason)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled():
    """Drops what JAX has compiled: it keeps thousands of programs else."""
    yield
    if not ON_TENSORFLOW:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def fresh_state():
    """Undoes what a test leaves in Keras's global state."""
    keras.backend.clear_session(free_memory=False)
    # Keras adds all arguments of a call to a message, where a test would find
    # any word that it looks for.
    keras.config.disable_traceback_filtering()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(11)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def two_replicas():
    """A MirroredStrategy over two logical CPUs.

    One for the whole process: strategies count their collective operations
    from the same number, and TensorFlow refuses two of one number and
    different shapes.
    """
    if not ON_TENSORFLOW:
        return None  # a test that needs it is skipped
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
