"""Checks of constructor arguments, with one form of message."""

import keras
from keras import constraints
from keras import initializers
from keras import regularizers


def invalid(name, expected, value):
    """The error for an argument of the right type and a wrong value."""
    return ValueError(
        f"Received an invalid value for argument `{name}`, expected "
        f"{expected}. Received: {name}={value!r}"
    )


def check_integer(name, value, least=1, optional=False):
    """Raises unless `value` is an integer of at least `least`."""
    if optional and value is None:
        return
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < least:
        expected = {0: "a non-negative integer", 1: "a positive integer"}
        raise invalid(
            name, expected[least] + (" or None" if optional else ""), value
        )


def check_positive(name, value, optional=False):
    """Raises unless `value` is a positive, finite number."""
    if optional and value is None:
        return
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < float("inf"):
        expected = "a positive number" + (" or None" if optional else "")
        raise invalid(name, expected, value)


def check_rate(name, value):
    """Raises unless `value` is a number in [0, 1)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 <= value < 1:
        raise invalid(name, "a number in the range [0, 1)", value)


def check_boolean(name, value):
    """Raises unless `value` is a boolean."""
    if not isinstance(value, bool):
        raise TypeError(
            f"Received an invalid value for argument `{name}`, expected a "
            f"boolean. Received: {name}={value!r}"
        )


def check_choice(name, value, choices):
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise invalid(name, f"one of {choices}", value)


def check_position(state, batch):
    """Raises unless a call's `initial_state` knows the position of each row.

    Args:
        state: What was given; `None` for none.
        batch: Number of rows, or `None`.
    """
    if state is None:
        return
    position = state.get("position") if isinstance(state, dict) else None
    shape = getattr(position, "shape", None)
    if shape is None or len(shape) != 1 or (
        None not in (shape[0], batch) and shape[0] != batch
    ):
        received = type(state).__name__
        if isinstance(state, dict):
            received = f"{sorted(state)}, with `position` of shape {shape}"
        raise ValueError(
            "Received an invalid value for argument `initial_state`, expected "
            f"a dict as `return_state` gives it, for {batch} rows. Received: "
            f"{received}"
        )


def get_seed(seed):
    """An integer, a seed generator or `None`, from that or its config."""
    if isinstance(seed, dict):
        seed = keras.saving.deserialize_keras_object(seed)
    integer = isinstance(seed, int) and not isinstance(seed, bool)
    if seed is None or integer or isinstance(
        seed, keras.random.SeedGenerator
    ):
        return seed
    raise invalid(
        "seed", "an integer, a keras.random.SeedGenerator or None", seed
    )


def dropout_generator(rate, seed, offset=0):
    """The generator of a layer's dropout masks, `None` without dropout."""
    if rate == 0 or isinstance(seed, keras.random.SeedGenerator):
        return seed if rate else None
    return keras.random.SeedGenerator(None if seed is None else seed + offset)


def serialize_seed(seed):
    """What `get_seed` takes back, for a config."""
    return keras.saving.serialize_keras_object(seed)


def serialize_weight_options(layer):
    """Config of a layer's initializers, regularizers and constraints."""
    config = {}
    for module, kind in (
        (initializers, "initializer"),
        (regularizers, "regularizer"),
        (constraints, "constraint"),
    ):
        for weight in ("kernel", "bias"):
            name = f"{weight}_{kind}"
            config[name] = module.serialize(getattr(layer, name))
    config["activity_regularizer"] = regularizers.serialize(
        layer.activity_regularizer
    )
    return config


def distinct_initializer(initializer, index):
    """A copy of an initializer, with a seed of its own.

    One seeded instance would give query, key and value the same kernel.
    """
    if not isinstance(initializer, initializers.Initializer):
        return initializer
    config = initializer.get_config()
    seed = get_seed(config.get("seed"))
    if isinstance(seed, keras.random.SeedGenerator):
        seed = seed.get_config()["seed"]
    if seed is not None:
        config["seed"] = seed + index
    return type(initializer).from_config(config)
