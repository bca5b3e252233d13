"""Feature maps: which kernel attention uses, and how it is estimated.

Like initializers, they are small objects with a configuration:
`get("relu")`, `serialize(feature_map)`, `deserialize(config)`.
"""

import inspect

import keras
from keras import ops

from keras_performer import arguments
from keras_performer.ops.features import exponential_log_features
from keras_performer.ops.features import generalized_features
from keras_performer.ops.features import positive_log_features
from keras_performer.ops.projections import orthogonal_gaussian

PACKAGE = "keras_performer"


@keras.saving.register_keras_serializable(package=PACKAGE)
class FeatureMap:
    """Base class of all feature maps.

    A subclass states what kind of features it gives, and how; one with a
    projection also defines `projection_shape` and `draw_projection`.

    ```python
    @keras.saving.register_keras_serializable(package="my_package")
    class Squares(keras_performer.FeatureMap):
        def __call__(self, x, projection=None, is_query=True):
            return keras.ops.square(x)
    ```

    Attributes:
        log_space: Whether `__call__` gives the *logarithm* of positive
            features. Attention then stabilises them so that no size of
            inputs overflows or underflows.
        estimates_softmax: Whether the product of the features of x and y
            estimates `exp(x.y)`. Causal layers may then see near tokens
            exactly (`local_window`).
    """

    log_space = False
    estimates_softmax = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        draws = cls.draw_projection is not FeatureMap.draw_projection
        shaped = cls.projection_shape is not FeatureMap.projection_shape
        if draws != shaped:
            raise TypeError(
                f"{cls.__name__} must define both `projection_shape` and "
                "`draw_projection`, or neither."
            )

    def projection_shape(self, num_features, dim):
        """Shape of the projection, or `None` for a map without one.

        Args:
            num_features: Features for each head, M.
            dim: Width of queries and keys, `key_dim`.

        Returns:
            Tuple of integers or `None`.
        """
        return None

    def draw_projection(self, num_features, dim, seed=None):
        """Draws the projection that `__call__` is handed, or `None`.

        Args:
            num_features: Features for each head, M.
            dim: Width of queries and keys, `key_dim`.
            seed: Integer, `keras.random.SeedGenerator` or `None`.

        Returns:
            `None`, or a float32 tensor of shape `projection_shape(...)`. A
            layer keeps it as a non-trainable weight.
        """
        return None

    def __call__(self, x, projection=None, is_query=True):
        """Features of queries or keys.

        Args:
            x: Tensor `(batch, heads, length, key_dim)`: queries or keys
                times `key_dim ** -0.25`, float32 or float64. Each token must
                be mapped by itself.
            projection: What `draw_projection` gave, in the dtype of `x`.
            is_query: Whether `x` holds queries.

        Returns:
            Tensor `(batch, heads, length, features)`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement `__call__`."
        )

    def get_config(self):
        """The constructor's arguments, for a map that has none."""
        return {}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable(package=PACKAGE)
class FavorPlus(FeatureMap):
    """Positive orthogonal random features of the softmax kernel, FAVOR+.

    Feature i of x is `M^(-1/2) exp(w_i.x - |x|^2 / 2)` with Gaussian rows
    w_i; the product of the features of x and y has expectation `exp(x.y)`.
    The relative standard deviation of one entry is about
    `sqrt((exp(|x + y|^2) - 1) / M)`, less with orthogonal rows and
    antithetic pairs: sharp attention needs many features.

    Args:
        antithetic: Whether each row serves twice, as w and -w: half the
            projections and a smaller variance (the hyperbolic features of
            the paper).
        orthogonal: Whether rows are orthogonal in blocks of `key_dim`.
        regularized: Whether all rows have norm `sqrt(key_dim)`: the
            regularised softmax kernel SMREG, which bounds the softmax kernel
            from below (no longer unbiased).

    Raises:
        TypeError: If an argument is not a boolean.

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), Lemma 1,
      Section 2.4 and Theorem 1
    """

    log_space = True
    estimates_softmax = True

    def __init__(self, antithetic=True, orthogonal=True, regularized=False):
        for name, value in (
            ("antithetic", antithetic),
            ("orthogonal", orthogonal),
            ("regularized", regularized),
        ):
            arguments.check_boolean(name, value)
        self.antithetic = antithetic
        self.orthogonal = orthogonal
        self.regularized = regularized

    def projection_shape(self, num_features, dim):
        return (num_features, dim)

    def draw_projection(self, num_features, dim, seed=None):
        """Draws `(num_features, dim)` rows, one for each feature."""
        rows = -(-num_features // 2) if self.antithetic else num_features
        if self.orthogonal:
            projection = orthogonal_gaussian(rows, dim, seed)
        else:
            projection = keras.random.normal(
                (rows, dim), dtype="float32", seed=seed
            )
        if self.regularized:
            norms = ops.sqrt(
                ops.sum(ops.square(projection), axis=-1, keepdims=True)
            )
            projection = projection * (dim**0.5 / norms)
        if self.antithetic:
            mirrored = -projection[: num_features // 2]
            projection = ops.concatenate([projection, mirrored], axis=0)
        return projection

    def __call__(self, x, projection=None, is_query=True):
        return positive_log_features(x, projection, self.antithetic)

    def get_config(self):
        return {
            "antithetic": self.antithetic,
            "orthogonal": self.orthogonal,
            "regularized": self.regularized,
        }


def _elu_plus_one(x):
    return ops.elu(x) + 1.0


def _identity(x):
    return x


# Names of `GeneralizedKernel`'s functions, and short names for a kernel.
ACTIVATIONS = {
    "relu": ops.relu,
    "elu": _elu_plus_one,
    "exp": ops.exp,
    "sigmoid": ops.sigmoid,
    "gelu": ops.gelu,
    "abs": ops.abs,
    "cos": ops.cos,
    "tanh": ops.tanh,
    "identity": _identity,
    "square": ops.square,
}


@keras.saving.register_keras_serializable(package=PACKAGE)
class GeneralizedKernel(FeatureMap):
    """Features `M^(-1/2) (f(w_i.x) + epsilon)`: Performer-ReLU and others.

    It is a kernel of its own and does not estimate softmax attention. With
    "relu" and the defaults it is the generalised attention of the paper.

    Functions that can be negative ("cos", "tanh", "identity", "gelu" or
    one's own) make attention weights of both signs. Their sum, the
    denominator, can then be near 0 and the output large; where it is below
    1e-12 the output is 0. Outputs and gradients are finite as long as f is.
    "exp" is computed in log space, for inputs of any size.

    Args:
        activation: The function f: "relu", "elu" (that is, elu + 1), "exp",
            "sigmoid", "gelu", "abs", "cos", "tanh", "identity", "square", or
            an elementwise function. To be saved, the latter is registered
            with `keras.saving.register_keras_serializable`.
        epsilon: Number of at least 0, added to f: keeps the denominator away
            from 0 where f vanishes.
        projected: Whether f acts on projections w_i.x. If not, it acts on
            the entries of x, there are `key_dim` features whatever
            `num_features`, and nothing is drawn.

    Raises:
        TypeError: If `activation` is neither a name nor callable, or
            `projected` no boolean.
        ValueError: If the name is unknown or `epsilon` is negative.

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794),
      Section 2.2 and Appendix B.3
    """

    def __init__(self, activation="relu", epsilon=1e-3, projected=True):
        if isinstance(activation, dict):
            activation = keras.saving.deserialize_keras_object(activation)
        if isinstance(activation, str):
            arguments.check_choice(
                "activation", activation, sorted(ACTIVATIONS)
            )
        elif not callable(activation):
            raise TypeError(
                "Received an invalid value for argument `activation`, "
                "expected a name or a function. Received: "
                f"activation={activation!r}"
            )
        if not isinstance(epsilon, (int, float)) or not epsilon >= 0:
            raise arguments.invalid(
                "epsilon", "a number of at least 0", epsilon
            )
        arguments.check_boolean("projected", projected)
        self.activation = activation
        self.epsilon = epsilon
        self.projected = projected
        self.log_space = activation == "exp"

    def projection_shape(self, num_features, dim):
        return (num_features, dim) if self.projected else None

    def draw_projection(self, num_features, dim, seed=None):
        """Draws `(num_features, dim)` orthogonal rows, if projected."""
        if not self.projected:
            return None
        return orthogonal_gaussian(num_features, dim, seed)

    def __call__(self, x, projection=None, is_query=True):
        if self.log_space:
            return exponential_log_features(x, projection, self.epsilon)
        activation = ACTIVATIONS.get(self.activation, self.activation)
        return generalized_features(x, projection, activation, self.epsilon)

    def get_config(self):
        activation = self.activation
        if not isinstance(activation, str):
            activation = keras.saving.serialize_keras_object(activation)
        return {
            "activation": activation,
            "epsilon": self.epsilon,
            "projected": self.projected,
        }


@keras.saving.register_keras_serializable(package=PACKAGE)
class Exact(FeatureMap):
    """No features: exact softmax attention, quadratic in the length.

    The choice for short sequences, and the baseline to compare with. Layers
    compute it by `ops.exact_attention`.
    """

    def __call__(self, x, projection=None, is_query=True):
        raise TypeError("Exact attention has no features.")


_NAMES = {"favor+": FavorPlus, "exact": Exact}


def names():
    """Names that `get` knows, sorted."""
    return sorted([*_NAMES, *ACTIVATIONS])


def get(identifier):
    """Retrieves a feature map.

    Args:
        identifier: A name ("favor+", "exact", or a function of
            `GeneralizedKernel` such as "relu"), a configuration as
            `serialize` gives it, a `FeatureMap`, or a subclass of it.

    Returns:
        A `FeatureMap`.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If the identifier is of another type.
    """
    if isinstance(identifier, FeatureMap):
        return identifier
    if inspect.isclass(identifier) and issubclass(identifier, FeatureMap):
        return identifier()
    if isinstance(identifier, dict):
        return deserialize(identifier)
    if isinstance(identifier, str):
        if identifier in _NAMES:
            return _NAMES[identifier]()
        if identifier in ACTIVATIONS:
            return GeneralizedKernel(identifier)
        raise arguments.invalid(
            "feature_map",
            f"one of {names()}, a FeatureMap or its config",
            identifier,
        )
    raise TypeError(
        "Received an invalid value for argument `feature_map`, expected a "
        "name, a FeatureMap or its config. Received: "
        f"feature_map={identifier!r} of type {type(identifier).__name__}"
    )


def serialize(feature_map):
    """Configuration of a feature map, a dict for `deserialize` or JSON."""
    return keras.saving.serialize_keras_object(feature_map)


def deserialize(config, custom_objects=None):
    """Feature map of a configuration.

    Args:
        config: What `serialize` gave.
        custom_objects: Optional dict of names to classes that are not
            registered.

    Returns:
        A `FeatureMap`.

    Raises:
        TypeError: If the configuration is that of something else.
    """
    feature_map = keras.saving.deserialize_keras_object(
        config, custom_objects=custom_objects
    )
    if not isinstance(feature_map, FeatureMap):
        raise TypeError(
            "Received an invalid value for argument `config`, expected the "
            f"config of a FeatureMap. Received: config={config!r}"
        )
    return feature_map
