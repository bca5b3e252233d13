"""What the package needs below it, checked before anything else runs."""

SUPPORTED_BACKENDS = ("tensorflow", "jax")


def require_backend():
    """Imports Keras and checks that a supported backend runs it.

    The package installs no backend of its own, as a hard dependency would
    overwrite the build that a TPU or GPU machine already has. So a missing one
    is the first thing that a newcomer meets, and deserves a plain sentence.

    Returns:
        The name of the backend.

    Raises:
        ImportError: If Keras or its backend is not installed, or if the
            backend is not supported.
    """
    try:
        import keras
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "keras":
            raise ImportError(
                "keras_performer needs Keras 3, which is not installed. "
                + _INSTALL
            ) from error
        if missing in ("tensorflow", "jax", "jaxlib"):
            backend = "tensorflow" if missing == "tensorflow" else "jax"
            raise ImportError(
                f"keras_performer needs a backend for Keras: Keras is set to "
                f"{backend}, and {missing} is not installed. " + _INSTALL
            ) from error
        if missing in ("torch", "openvino"):
            raise ImportError(_unsupported(missing)) from error
        raise
    backend = keras.config.backend()
    if backend not in SUPPORTED_BACKENDS:
        raise ImportError(_unsupported(backend))
    return backend


_INSTALL = (
    'Install one by `pip install "keras-performer[tensorflow]"`, or by '
    '`pip install "keras-performer[jax]"` and set KERAS_BACKEND=jax.'
)


def _unsupported(backend):
    return (
        f"keras_performer does not support the Keras backend {backend}. "
        f"Supported backends: {', '.join(SUPPORTED_BACKENDS)}. Set "
        "KERAS_BACKEND to one of them before Keras is imported."
    )
