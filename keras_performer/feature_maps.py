"""Feature maps: which kernel attention uses, and how it is estimated.

Like initializers, they are small objects with a configuration:
`get("relu")`, `serialize(feature_map)`, `deserialize(config)`.
"""

import inspect
import math
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_performer import arguments
from keras_performer.ops.features import exponential_log_features
from keras_performer.ops.features import generalized_features
from keras_performer.ops.features import optimal_a
from keras_performer.ops.features import optimal_positive_log_features
from keras_performer.ops.features import positive_log_features
from keras_performer.ops.features import softmax_log_features
from keras_performer.ops.features import trigonometric_features
from keras_performer.ops.projections import iid_gaussian
from keras_performer.ops.projections import orthogonal_gaussian
from keras_performer.ops.projections import simplex_gaussian

PACKAGE = "keras_performer"

# Trained logarithms are kept a tenth as large. Optimizers of the Adam family
# move each weight by about the learning rate; so a head opens or closes its
# far part in a few hundred steps, not in thousands.
LOG_SCALE = 10.0

# A of FAVOR++ grows with phi, and logarithms of features with A |w|^2: beyond
# this phi of a coordinate they would lose their digits in float32. The estimate
# is unbiased for every A, and long of no use there.
LARGEST_PHI = 1e3


class WeightSpec(NamedTuple):
    """A weight that a layer keeps for its feature map, in float32.

    Attributes:
        shape: Tuple of integers.
        initializer: Name, `keras.Initializer`, or function of (shape, dtype).
        trainable: Whether it is trained. If not, replicas of a distributed
            run hold the same value.
    """

    shape: Any
    initializer: Any = "zeros"
    trainable: bool = False


@keras.saving.register_keras_serializable(package=PACKAGE)
class FeatureMap:
    """Base class of all feature maps.

    A subclass states what kind of features it gives, and how; one with a
    projection also defines `projection_shape` and `draw_projection`, one with
    weights `weight_specs`, one that adapts to its inputs `statistics_width`,
    `observe` and `adapt`.

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
            estimates `exp(x.y)`.
        allows_window: Whether causal layers may see near tokens exactly
            (`local_window`) beside far ones through these features. True for
            maps in log space that estimate the softmax kernel.
    """

    log_space = False
    estimates_softmax = False

    @property
    def allows_window(self):
        return self.log_space and self.estimates_softmax

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

    def weight_specs(self, num_heads, num_features, dim, seed=None):
        """Weights that `__call__` is handed.

        Args:
            num_heads: Number of heads, H.
            num_features: Features for each head, M.
            dim: Width of queries and keys, `key_dim`.
            seed: Integer for what is drawn, or `None`.

        Returns:
            Dict of names to `WeightSpec`.
        """
        return {}

    def statistics_width(self, dim):
        """Number of statistics of each head's inputs that `adapt` needs.

        Args:
            dim: Width of queries and keys, `key_dim`.

        Returns:
            Integer; 0 for a map that does not adapt.
        """
        return 0

    def observe(self, x):
        """What each token adds to the statistics.

        Args:
            x: Tensor `(..., key_dim)`, scaled as for `__call__`.

        Returns:
            Tensor `(..., statistics_width(key_dim))`. The layer takes means
            over valid tokens and averages them over training steps.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement `observe`."
        )

    def adapt(self, query_statistics, key_statistics, weights):
        """Weights that follow from the statistics.

        Args:
            query_statistics: Tensor `(heads, statistics_width(key_dim))`.
            key_statistics: Tensor of the same shape.
            weights: Dict of the weights of `weight_specs`.

        Returns:
            Dict of new values for some of the weights.
        """
        return {}

    def __call__(self, x, projection=None, is_query=True, weights=None):
        """Features of queries or keys.

        Args:
            x: Tensor `(batch, heads, length, key_dim)`: queries or keys
                times `key_dim ** -0.25`, float32 or float64. Each token must
                be mapped by itself.
            projection: What `draw_projection` gave, in the dtype of `x`.
            is_query: Whether `x` holds queries.
            weights: Dict of the weights of `weight_specs`, in the dtype of
                `x`. Not handed to a map that has none. Whatever is trained
                must be among them: attention has a gradient of its own,
                which does not reach a variable that a map holds.

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


class _Projected(FeatureMap):
    """What maps with Gaussian projections share."""

    def __init__(self, antithetic, orthogonal, regularized, simplex):
        for name, value in (
            ("antithetic", antithetic),
            ("orthogonal", orthogonal),
            ("regularized", regularized),
            ("simplex", simplex),
        ):
            arguments.check_boolean(name, value)
        if simplex and not orthogonal:
            raise arguments.invalid(
                "simplex", "False with orthogonal=False", simplex
            )
        self.antithetic = antithetic
        self.orthogonal = orthogonal
        self.regularized = regularized
        self.simplex = simplex

    def _draw(self, rows, dim, seed):
        if self.simplex:
            projection = simplex_gaussian(rows, dim, seed)
        elif self.orthogonal:
            projection = orthogonal_gaussian(rows, dim, seed)
        else:
            projection = iid_gaussian(rows, dim, seed)
        if self.regularized:
            norms = ops.sqrt(
                ops.sum(ops.square(projection), axis=-1, keepdims=True)
            )
            projection = projection * (dim**0.5 / norms)
        return projection

    def get_config(self):
        return {
            "antithetic": self.antithetic,
            "orthogonal": self.orthogonal,
            "regularized": self.regularized,
            "simplex": self.simplex,
        }


@keras.saving.register_keras_serializable(package=PACKAGE)
class FavorPlus(_Projected):
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
        simplex: Whether the rows of a block point to the corners of a
            simplex instead
            ([Reid et al., 2023](https://arxiv.org/abs/2301.13856)). Without
            antithetic pairs their variance is smaller still. Needs a
            `key_dim` of at least 2.
        temperature: Number t above 0, the first value of a trained
            temperature for each head: features are those of `t x`, and
            estimate `exp(t^2 x.y)`. Below 1 the kernel is smoother and its
            estimate better. `None` or 1 untrained is the softmax kernel.
        far_weight: Number above 0, the first value of a trained factor for
            each head on all that is seen through features, against what a
            local window sees exactly. It cancels where there is no window.
            `None` is the unbiased estimate of the whole. Both trained
            numbers are kept as logarithms (`log_far_weight`,
            `log_temperature`): leave them out of a weight decay, which would
            pull the numbers towards 1.

    Raises:
        TypeError: If one of the first four arguments is not a boolean.
        ValueError: If `simplex` is set without `orthogonal`, or
            `temperature` or `far_weight` is not a positive number or `None`.

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794), Lemma 1,
      Section 2.4 and Theorem 1
    """

    log_space = True
    estimates_softmax = True

    def __init__(
        self,
        antithetic=True,
        orthogonal=True,
        regularized=False,
        simplex=False,
        temperature=None,
        far_weight=None,
    ):
        super().__init__(antithetic, orthogonal, regularized, simplex)
        arguments.check_positive("temperature", temperature, optional=True)
        arguments.check_positive("far_weight", far_weight, optional=True)
        self.temperature = temperature
        self.far_weight = far_weight

    def projection_shape(self, num_features, dim):
        return (num_features, dim)

    def draw_projection(self, num_features, dim, seed=None):
        """Draws `(num_features, dim)` rows, one for each feature."""
        if not self.antithetic:
            return self._draw(num_features, dim, seed)
        projection = self._draw(-(-num_features // 2), dim, seed)
        mirrored = -projection[: num_features // 2]
        return ops.concatenate([projection, mirrored], axis=0)

    def weight_specs(self, num_heads, num_features, dim, seed=None):
        specs = {}
        for name in ("temperature", "far_weight"):
            first = getattr(self, name)
            if first is not None:
                specs[f"log_{name}"] = _log_weight_spec(num_heads, first)
        return specs

    def __call__(self, x, projection=None, is_query=True, weights=None):
        weights = weights or {}
        if "log_temperature" in weights:
            x = x * ops.exp(_log_of_each_head(weights["log_temperature"]))
        features = self._log_features(x, projection, is_query, weights)
        if is_query and "log_far_weight" in weights:
            features += _log_of_each_head(weights["log_far_weight"])
        return features

    def _log_features(self, x, projection, is_query, weights):
        return positive_log_features(x, projection, self.antithetic)

    def get_config(self):
        return {
            **super().get_config(),
            "temperature": self.temperature,
            "far_weight": self.far_weight,
        }


def _log_weight_spec(num_heads, first):
    """A trained logarithm for each head, first that of a number."""
    constant = keras.initializers.Constant(math.log(first) / LOG_SCALE)
    return WeightSpec((num_heads,), constant, trainable=True)


def _log_of_each_head(weight):
    return LOG_SCALE * _for_each_head(weight)


def _for_each_head(x):
    """`[H]` or `[H, D]` for products with `[B, H, N, D]`."""
    return x[:, None, None] if len(x.shape) == 1 else x[:, None, :]


@keras.saving.register_keras_serializable(package=PACKAGE)
class FavorPlusPlus(FavorPlus):
    """Optimal positive random features of the softmax kernel, FAVOR++.

    Feature i of x is `M^(-1/2) (1 - 4 A)^(d/4) exp(A |w_i|^2 + sqrt(1 - 4 A)
    w_i.x - |x|^2 / 2)`. The estimate of `exp(x.y)` is unbiased for every A;
    each head has the A of least variance for the mean of `|x + y|^2` over
    its queries and keys.

    That mean is a running average over training steps, of valid tokens only,
    summed over all replicas. A step uses what the steps *before* it gave, so
    that the future of a sequence does not change its past; inference uses
    what is stored. A starts at 0, which is FAVOR+. `layer.calibrate(data)`
    sets it without training. In a layer that is called several times in one
    step the last call counts, and a frozen layer keeps what it has.

    With `regularized=True` the estimate is biased, and for an A other than 0
    no bound either.

    Args:
        antithetic: As for `FavorPlus`, as are the others.
        orthogonal: See `FavorPlus`.
        regularized: See `FavorPlus`.
        simplex: See `FavorPlus`.
        temperature: See `FavorPlus`.
        far_weight: See `FavorPlus`.

    Raises:
        TypeError: As `FavorPlus`.
        ValueError: As `FavorPlus`.

    Reference:

    - [Likhosherstov et al., 2022](https://arxiv.org/abs/2205.15317),
      Section 3.2
    """

    def weight_specs(self, num_heads, num_features, dim, seed=None):
        return {
            **super().weight_specs(num_heads, num_features, dim, seed),
            "a": WeightSpec((num_heads,)),
        }

    def statistics_width(self, dim):
        return 2 * dim

    def observe(self, x):
        return ops.concatenate([x, ops.square(x)], axis=-1)

    def adapt(self, query_statistics, key_statistics, weights):
        mean_x, square_x = ops.split(query_statistics, 2, axis=-1)  # [H, D]
        mean_y, square_y = ops.split(key_statistics, 2, axis=-1)
        squares = self._squares(square_x, square_y)
        phi = ops.sum(squares + 2.0 * mean_x * mean_y, axis=-1)  # [H]
        if "log_temperature" in weights:
            log = LOG_SCALE * weights["log_temperature"]
            phi = phi * ops.exp(2.0 * log)
        dim = mean_x.shape[-1]
        return {"a": optimal_a(ops.minimum(phi, LARGEST_PHI * dim), dim)}

    def _squares(self, square_x, square_y):
        """Mean squares of x and of y as the features see them, added."""
        return square_x + square_y

    def _log_features(self, x, projection, is_query, weights):
        a = ops.stop_gradient(_for_each_head(weights["a"]))
        return optimal_positive_log_features(x, projection, a, self.antithetic)


@keras.saving.register_keras_serializable(package=PACKAGE)
class FavorSharp(FavorPlusPlus):
    """FAVOR++ on inputs scaled to their sizes, FAVOR#, in diagonal form.

    `exp(x.y)` does not change when coordinate l of x is multiplied by psi_l
    and that of y divided by it. The variance is least for `psi_l = (mean
    y_l^2 / mean x_l^2)^(1/4)`; each head has its own, from running averages
    as those of `FavorPlusPlus`. It helps where queries and keys are spread
    differently over the coordinates.

    Args:
        antithetic: As for `FavorPlus`, as are the others.
        orthogonal: See `FavorPlus`.
        regularized: See `FavorPlus`.
        simplex: See `FavorPlus`.
        temperature: See `FavorPlus`.
        far_weight: See `FavorPlus`.

    Raises:
        TypeError: As `FavorPlus`.
        ValueError: As `FavorPlus`.

    Reference:

    - [Likhosherstov et al., 2023](https://arxiv.org/abs/2302.00787)
    """

    def weight_specs(self, num_heads, num_features, dim, seed=None):
        return {
            **super().weight_specs(num_heads, num_features, dim, seed),
            "log_psi": WeightSpec((num_heads, dim)),
        }

    def adapt(self, query_statistics, key_statistics, weights):
        square_x = ops.split(query_statistics, 2, axis=-1)[1]
        square_y = ops.split(key_statistics, 2, axis=-1)[1]
        # A coordinate that is always 0 is left as it is.
        seen = ops.logical_and(square_x > 0, square_y > 0)
        ratio = ops.where(seen, square_y, 1.0) / ops.where(
            seen, square_x, 1.0
        )
        return {
            **super().adapt(query_statistics, key_statistics, weights),
            "log_psi": 0.25 * ops.log(ratio),
        }

    def _squares(self, square_x, square_y):
        return 2.0 * ops.sqrt(square_x * square_y)

    def _log_features(self, x, projection, is_query, weights):
        log_psi = ops.stop_gradient(_for_each_head(weights["log_psi"]))
        x = x * ops.exp(log_psi if is_query else -log_psi)
        return super()._log_features(x, projection, is_query, weights)


@keras.saving.register_keras_serializable(package=PACKAGE)
class TrigonometricFeatures(_Projected):
    """Random features of sines and cosines: the unstable baseline.

    Unbiased for `exp(x.y)`, but features of both signs: where the kernel is
    small, which is where most of attention is, their variance is largest, and
    the sum of a row's weights may vanish or turn negative. The paper shows
    them to fail in training. They are here to be compared with
    (`tools/approximation_error.py`), not for models.

    Args:
        orthogonal: Whether rows are orthogonal in blocks of `key_dim`.
        regularized: Whether all rows have norm `sqrt(key_dim)`.
        simplex: Whether the rows of a block point to the corners of a
            simplex instead.

    Raises:
        TypeError: If an argument is not a boolean.
        ValueError: If `simplex` is set without `orthogonal`.

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794),
      Section 2.3 and Figure 2
    """

    estimates_softmax = True

    def __init__(self, orthogonal=True, regularized=False, simplex=False):
        super().__init__(False, orthogonal, regularized, simplex)

    def projection_shape(self, num_features, dim):
        _check_even(num_features, self)
        return (num_features // 2, dim)

    def draw_projection(self, num_features, dim, seed=None):
        """Draws `(num_features / 2, dim)` rows; each serves twice."""
        _check_even(num_features, self)
        return self._draw(num_features // 2, dim, seed)

    def __call__(self, x, projection=None, is_query=True):
        return trigonometric_features(x, projection)

    def get_config(self):
        config = super().get_config()
        del config["antithetic"]
        return config


@keras.saving.register_keras_serializable(package=PACKAGE)
class LearnedFeatures(FeatureMap):
    """Trained features: softmax of `W x` and of `-W x`, as in Hedgehog.

    W is a weight of the layer, one matrix `(key_dim, M / 2)` for each head,
    shared by queries and keys. It starts as the identity, followed by unit
    vectors of random directions where `M / 2` is above `key_dim`. The kernel
    is one of its own, near `exp(x.y)` for small inputs at the start; beside
    the exact kernel of a local window a trained factor finds its weight.

    Args:
        far_weight: As for `FavorPlus`; a number above 0.

    Raises:
        ValueError: If `far_weight` is not a positive number.

    Reference:

    - [Zhang et al., 2024](https://arxiv.org/abs/2402.04347), Section 4.1
    """

    log_space = True
    allows_window = True

    def __init__(self, far_weight=1.0):
        arguments.check_positive("far_weight", far_weight)
        self.far_weight = far_weight

    def weight_specs(self, num_heads, num_features, dim, seed=None):
        _check_even(num_features, self)
        columns = num_features // 2
        return {
            "kernel": WeightSpec(
                (num_heads, dim, columns),
                lambda shape, dtype=None: _identity_start(shape, dtype, seed),
                True,
            ),
            "log_far_weight": _log_weight_spec(num_heads, self.far_weight),
        }

    def __call__(self, x, projection=None, is_query=True, weights=None):
        features = softmax_log_features(x, weights["kernel"])
        if is_query:
            features += _log_of_each_head(weights["log_far_weight"])
        return features

    def get_config(self):
        return {"far_weight": self.far_weight}


def _identity_start(shape, dtype, seed):
    """`[H, d, m]`: the identity, then unit vectors of random directions."""
    heads, dim, columns = shape
    kernel = ops.eye(dim, min(dim, columns), dtype=dtype)
    kernel = ops.broadcast_to(kernel, (heads, *kernel.shape))
    more = columns - dim
    if more <= 0:
        return kernel
    rows = iid_gaussian(heads * more, dim, seed)
    rows = ops.reshape(rows, (heads, more, dim))
    norms = ops.sqrt(ops.sum(ops.square(rows), axis=-1, keepdims=True))
    rest = ops.swapaxes(rows / norms, -1, -2)
    return ops.concatenate([kernel, ops.cast(rest, kernel.dtype)], axis=-1)


def _check_even(num_features, feature_map):
    if num_features % 2:
        raise arguments.invalid(
            "num_features",
            f"an even number for {type(feature_map).__name__}",
            num_features,
        )


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
        ValueError: If the name is unknown or `epsilon` is negative or not
            finite.

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
        number = isinstance(epsilon, (int, float))
        number = number and not isinstance(epsilon, bool)
        if not number or not 0 <= epsilon < math.inf:
            raise arguments.invalid(
                "epsilon", "a finite number of at least 0", epsilon
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


_NAMES = {
    "favor+": FavorPlus,
    "favor++": FavorPlusPlus,
    "favor#": FavorSharp,
    "trig": TrigonometricFeatures,
    "hedgehog": LearnedFeatures,
    "exact": Exact,
}


def names():
    """Names that `get` knows, sorted."""
    return sorted([*_NAMES, *ACTIVATIONS])


def get(identifier):
    """Retrieves a feature map.

    Args:
        identifier: A name (see `names`: "favor+", "exact", a function of
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
        try:
            return deserialize(identifier)
        except (TypeError, ValueError, KeyError) as error:
            raise type(error)(
                "Received an invalid value for argument `feature_map`, "
                f"expected the config of a FeatureMap: {error}"
            ) from error
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
