"""A Transformer block around PerformerAttention."""

import keras
from keras import activations
from keras import constraints
from keras import initializers
from keras import ops
from keras import regularizers

from keras_performer import arguments
from keras_performer import feature_maps
from keras_performer.layers.dropout import drop
from keras_performer.layers.masks import boolean_mask
from keras_performer.layers.masks import check_key_mask
from keras_performer.layers.masks import mask_shape
from keras_performer.layers.performer_attention import PerformerAttention
from keras_performer.layers.performer_attention import no_regularized_state
from keras_performer.layers.steps import TrainingSteps
from keras_performer.layers.steps import parts_scope


@keras.saving.register_keras_serializable(package="keras_performer")
class PerformerBlock(TrainingSteps, keras.layers.Layer):
    """Self-attention and a feed-forward network, each with a residual.

    With `normalize_first` (the default)
    `x + attention(attention_norm(x))`, then
    `x + output_dense(intermediate(feedforward_norm(x)))`; otherwise the norm
    follows each sum. Sublayers are `attention`, `attention_norm`,
    `intermediate`, `output_dense` and `feedforward_norm`.

    Args:
        num_heads: Number of attention heads.
        intermediate_dim: Width of the feed-forward network's inner layer.
        key_dim: Width of each head; `None` for the input's width over
            `num_heads`.
        feature_map: See `PerformerAttention`, as for the next six.
        num_features: Features for each head, M.
        causal: Whether token i sees tokens `j <= i` only.
        redraw_interval: Training steps between new projections; `None`
            keeps the first. See `PerformerAttention`.
        local_window: W, near tokens seen exactly by causal softmax maps.
        chunk_size: Tokens for each step of the scan.
        rotary: Whether to rotate queries and keys by their position.
        dropout: Rate of dropout on the output of both parts.
        activation: Activation of the feed-forward network.
        normalize_first: Whether norms come before the two parts.
        layer_norm_epsilon: Epsilon of the two layer norms.
        use_bias: Whether dense layers have biases.
        seed: Integer or `keras.random.SeedGenerator` for the projection and
            dropout; `None` draws one.
        kernel_initializer: Initializer of the dense kernels.
        bias_initializer: Initializer of the dense biases.
        kernel_regularizer: Regularizer of the dense kernels.
        bias_regularizer: Regularizer of the dense biases.
        activity_regularizer: Regularizer of the block's output.
        kernel_constraint: Constraint of the dense kernels.
        bias_constraint: Constraint of the dense biases.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: Tensor of shape `(B, L, width)`.
        mask: Mask of shape `(B, L)`; true keeps a token as a key.
        initial_state: State of all tokens before these; see
            `PerformerAttention`. Causal blocks only.
        return_state: Whether to return the state after these tokens too.
        training: Whether dropout is active.

    Returns:
        Tensor of the shape of `x`, in the compute dtype, with its mask. With
        `return_state` also the state, a flat dict of tensors.

    Raises:
        ValueError: If an argument has a wrong value, or the width is not a
            multiple of `num_heads` where `key_dim` is not given.
        TypeError: If an argument has a wrong type.

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    def __init__(
        self,
        num_heads,
        intermediate_dim,
        key_dim=None,
        feature_map="favor+",
        num_features=256,
        causal=False,
        redraw_interval=None,
        local_window=None,
        chunk_size=None,
        rotary=False,
        dropout=0.0,
        activation="gelu",
        normalize_first=True,
        layer_norm_epsilon=1e-5,
        use_bias=True,
        seed=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        activity_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        **kwargs,
    ):
        arguments.check_integer("intermediate_dim", intermediate_dim)
        arguments.check_integer("key_dim", key_dim, optional=True)
        arguments.check_boolean("normalize_first", normalize_first)
        number = isinstance(layer_norm_epsilon, (int, float))
        if not number or not layer_norm_epsilon > 0:
            raise arguments.invalid(
                "layer_norm_epsilon", "a positive number", layer_norm_epsilon
            )
        # A state keeps its float32 under every policy: `call` casts the rest.
        super().__init__(
            activity_regularizer=activity_regularizer,
            autocast=False,
            **kwargs,
        )
        self.supports_masking = True
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.key_dim = key_dim
        self.feature_map = feature_maps.get(feature_map)
        self.num_features = num_features
        self.causal = causal
        self.redraw_interval = redraw_interval
        self.local_window = local_window
        self.chunk_size = chunk_size
        self.rotary = rotary
        self.dropout = dropout
        self.activation = activations.get(activation)
        self.normalize_first = normalize_first
        self.layer_norm_epsilon = layer_norm_epsilon
        self.use_bias = use_bias
        self.seed = arguments.get_seed(seed)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        # A wrong argument of attention is an error here, not when built;
        # only the width of a head may have to wait for the input.
        self._attention(2 if key_dim is None else key_dim)

    def _attention(self, key_dim):
        return PerformerAttention(
            self.num_heads,
            key_dim,
            feature_map=self.feature_map,
            num_features=self.num_features,
            causal=self.causal,
            redraw_interval=self.redraw_interval,
            local_window=self.local_window,
            chunk_size=self.chunk_size,
            rotary=self.rotary,
            dropout=self.dropout,
            seed=self.seed,
            name="attention",
            **self._dense_options(),
        )

    def _dense_options(self, seed_offset=0):
        return {
            "use_bias": self.use_bias,
            "kernel_initializer": arguments.distinct_initializer(
                self.kernel_initializer, seed_offset
            ),
            "bias_initializer": arguments.distinct_initializer(
                self.bias_initializer, seed_offset
            ),
            "kernel_regularizer": self.kernel_regularizer,
            "bias_regularizer": self.bias_regularizer,
            "kernel_constraint": self.kernel_constraint,
            "bias_constraint": self.bias_constraint,
            "dtype": self.dtype_policy,
        }

    def build(self, x_shape):
        """Creates the weights.

        Args:
            x_shape: `(B, L, width)`; B and L may be `None`.
        """
        width = x_shape[-1]
        key_dim = self.key_dim
        if key_dim is None:
            if width is None or width % self.num_heads:
                raise ValueError(
                    f"{self.name} needs an input width that is a multiple of "
                    f"num_heads={self.num_heads}, or `key_dim`. Received: "
                    f"x.shape={tuple(x_shape)}"
                )
            key_dim = width // self.num_heads
        with parts_scope():
            self._build_parts(x_shape, key_dim)
        # Far from the seeds of attention's dropout, here and in other blocks
        # whose seeds count up: their masks have the same shape.
        self._dropout_generator = arguments.dropout_generator(
            self.dropout, self.seed, offset=2**16
        )
        self._width = width

    def _build_parts(self, x_shape, key_dim):
        self.attention = self._attention(key_dim)
        self.attention.build(x_shape)
        self.attention_norm = self._norm("attention_norm", x_shape)
        self.feedforward_norm = self._norm("feedforward_norm", x_shape)
        # Seeds 0 to 3 are attention's own.
        self.intermediate = keras.layers.Dense(
            self.intermediate_dim,
            activation=self.activation,
            name="intermediate",
            **self._dense_options(seed_offset=4),
        )
        self.intermediate.build(x_shape)
        self.output_dense = keras.layers.Dense(
            x_shape[-1],
            name="output_dense",
            **self._dense_options(seed_offset=5),
        )
        self.output_dense.build((*x_shape[:-1], self.intermediate_dim))

    def _norm(self, name, shape):
        norm = keras.layers.LayerNormalization(
            epsilon=self.layer_norm_epsilon, dtype=self.dtype_policy, name=name
        )
        norm.build(shape)
        return norm

    def call(
        self,
        x,
        mask=None,
        initial_state=None,
        return_state=False,
        training=None,
    ):
        self._check_width(x.shape)
        if mask is None and initial_state is not None:
            # Keras hands it over itself where there is one tensor only.
            mask = getattr(x, "_keras_mask", None)
        stateful = initial_state is not None or return_state
        if stateful:
            self._check_stateful()
            arguments.check_position(initial_state, x.shape[0])
        self._step(training, initial_state)
        x = ops.cast(x, self.compute_dtype)
        with self.attention._hold_step():
            x, state = self._parts(x, mask, initial_state, stateful, training)
        return (x, state) if return_state else x

    def _parts(self, x, mask, state, stateful, training):
        """Output of both parts, and the state after it if `stateful`."""
        residual = x
        if self.normalize_first:
            x = self.attention_norm(x)
        # Both: the norm carries on what an explicit mask may replace.
        x = self.attention(
            x,
            mask=mask,
            query_mask=mask,
            initial_state=state,
            return_state=stateful,
            training=training,
        )
        x, state = x if stateful else (x, None)
        x = residual + x
        if not self.normalize_first:
            x = self.attention_norm(x)
        residual = x
        if self.normalize_first:
            x = self.feedforward_norm(x)
        x = self.output_dense(self.intermediate(x))
        if training and self.dropout:
            x = drop(x, self.dropout, self._dropout_generator)
        x = residual + x
        if not self.normalize_first:
            x = self.feedforward_norm(x)
        return x, state

    def _dropout_generators(self):
        own = [self._dropout_generator] if self.dropout else []
        return self.attention._dropout_generators() + own

    def _check_stateful(self):
        """Raises where the block has no state."""
        self.attention._check_stateful(self.causal, False)
        if self.activity_regularizer is not None:
            raise no_regularized_state(self.name)

    def get_initial_state(self, batch_size):
        """The state of an empty prefix; see `PerformerAttention`.

        Args:
            batch_size: Number of sequences, B.

        Returns:
            A flat dict of tensors.

        Raises:
            ValueError: If the block is not built or not causal, or its
                feature map is "exact".
        """
        if not self.built:
            raise ValueError(
                f"{self.name} is not built yet: its state depends on its "
                "weights. Call it, or its `build`, first."
            )
        self._check_stateful()
        return self.attention.get_initial_state(batch_size)

    def _begin_step(self, fresh=None):
        self.attention._begin_step(fresh)

    def _recomputes_on_jax(self):
        return self.attention._recomputes_on_jax()

    def _check_width(self, shape):
        if self.built and (len(shape) != 3 or shape[-1] != self._width):
            raise ValueError(
                f"{self.name} was built for x of shape (batch, length, "
                f"{self._width}). Received: x.shape={tuple(shape)}"
            )

    def compute_mask(self, x, previous_mask=None):
        """The input's mask, as a boolean tensor, goes with the output."""
        return None if previous_mask is None else boolean_mask(previous_mask)

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def compute_output_spec(
        self,
        x,
        mask=None,
        initial_state=None,
        return_state=False,
        training=None,
    ):
        self._check_width(x.shape)
        if mask is not None:
            check_key_mask(mask_shape(mask), x.shape[:2], "mask")
        output = keras.KerasTensor(
            self.compute_output_shape(x.shape), dtype=self.compute_dtype
        )
        if initial_state is not None or return_state:
            self._check_stateful()
        if not return_state:
            return output
        return output, self.attention._state_spec(x.shape[0])

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "key_dim": self.key_dim,
            "feature_map": feature_maps.serialize(self.feature_map),
            "num_features": self.num_features,
            "causal": self.causal,
            "redraw_interval": self.redraw_interval,
            "local_window": self.local_window,
            "chunk_size": self.chunk_size,
            "rotary": self.rotary,
            "dropout": self.dropout,
            "activation": activations.serialize(self.activation),
            "normalize_first": self.normalize_first,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "use_bias": self.use_bias,
            "seed": arguments.serialize_seed(self.seed),
            **arguments.serialize_weight_options(self),
        }
