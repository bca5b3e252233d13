"""Multi-head attention in time and memory linear in the length."""

import string

import keras
from keras import constraints
from keras import initializers
from keras import ops
from keras import regularizers

from keras_performer import arguments
from keras_performer import feature_maps
from keras_performer import ops as attention_ops
from keras_performer.layers.dropout import drop
from keras_performer.layers.embeddings import rotary_embedding
from keras_performer.layers.embeddings import state_positions
from keras_performer.layers.feature_state import FeatureState
from keras_performer.layers.masks import boolean_mask
from keras_performer.layers.masks import check_factored_mask
from keras_performer.layers.masks import check_key_mask
from keras_performer.layers.masks import check_mask_argument
from keras_performer.layers.masks import combined_key_mask
from keras_performer.layers.masks import differ
from keras_performer.layers.masks import mask_shape
from keras_performer.layers.steps import parts_scope

# W of causal softmax maps where nobody chose another.
DEFAULT_LOCAL_WINDOW = 128


@keras.saving.register_keras_serializable(package="keras_performer")
class PerformerAttention(FeatureState, keras.layers.Layer):
    """Multi-head attention through a feature map, linear in the length.

    A drop-in for `keras.layers.MultiHeadAttention` on long sequences: the
    same sublayers `query`, `key`, `value` and `attention_output`, with
    kernels of the same shapes. In place of the matrix of all pairs, keys and
    values are summed once through the features of a kernel, and each query
    reads the sum. One tensor means self-attention, so the layer stacks in a
    `Sequential` model.

    Args:
        num_heads: Number of attention heads, H.
        key_dim: Width of each head's queries and keys, D.
        value_dim: Width of each head's values; `None` for `key_dim`.
        feature_map: The kernel: "favor+" (estimates softmax attention),
            "relu" and others (kernels of their own), "exact" (softmax
            attention itself, quadratic: for short sequences), a `FeatureMap`
            or its config. See `keras_performer.feature_maps`.
        num_features: Features for each head, M. More are more accurate and
            slower.
        causal: Whether token i sees tokens `j <= i` only.
        redraw_interval: Training steps between new projections; `None`
            keeps the first. Draws follow from the seed and the number of
            steps, both saved with the weights, so that replicas agree and a
            resumed run continues. Inference never draws. A step is a call
            of the outermost model with `training=True`; a layer that is
            frozen takes none.
        local_window: W. A causal softmax map sees the own and the previous
            block of W tokens exactly, and all before by features: up to 2 W
            tokens that is exact attention. `None`: 128 for those maps, 0 for
            others. 0 is the pure form of the paper.
        chunk_size: Tokens for each step of the scan. Changes the speed and
            the memory, never the result. `None`: chosen. With a local window
            it is rounded down to whole blocks, from 1 to 8.
        rotary: Whether to rotate queries and keys by their position
            ([Su et al., 2021](https://arxiv.org/abs/2104.09864)) before the
            feature map. Needs an even `key_dim`.
        dropout: Rate of dropout on the output, as no matrix of weights
            exists to drop from.
        use_bias: Whether the four dense layers have biases.
        output_shape: Output width (or a tuple of widths); `None` for the
            query's.
        seed: Integer or `keras.random.SeedGenerator` for the projection and
            the dropout; `None` draws one.
        kernel_initializer: Initializer of the dense kernels. With an integer
            seed each kernel has a seed of its own, counted up from it.
        bias_initializer: Initializer of the dense biases.
        kernel_regularizer: Regularizer of the dense kernels.
        bias_regularizer: Regularizer of the dense biases.
        activity_regularizer: Regularizer of the layer's output.
        kernel_constraint: Constraint of the dense kernels.
        bias_constraint: Constraint of the dense biases.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        query: Tensor of shape `(B, L, width)`.
        value: Tensor of shape `(B, S, width)`; `None`: the query.
        key: Tensor of shape `(B, S, width)`; `None`: the value.
        mask: Self-attention: mask of shape `(B, L)`, the key mask. In every
            mask of this layer, true (or nonzero) means *keep*.
        query_mask: Mask of shape `(B, L)`, as Keras carries it along with
            the query and on with the output. In self-attention it is a key
            mask too; in cross-attention it changes no number.
        value_mask: Mask of shape `(B, S)`.
        key_mask: Mask of shape `(B, S)`. All key masks that are given must
            agree to keep a key. A masked key is left out of numerator and
            denominator; a query without any key gets the output's bias.
        attention_mask: A mask that is the same for all queries, of shape
            `(B, S)`, `(B, 1, S)` or `(B, 1, 1, S)`. Others have no linear
            form and are refused.
        initial_state: State of all tokens before these, as `return_state` or
            `get_initial_state` gives it: these tokens continue the sequence.
            It is not changed. Causal layers only, and not for "exact", whose
            state would grow. Gradients flow through it.
        return_state: Whether to return the state after these tokens too.
            Its size does not depend on their number. Where a state is given
            or returned, a masked token is not there: it takes no position
            and leaves the state of its row as it is, so that rows may be
            padded on either side. In training, no projection is redrawn and
            no statistic adopted between the segments of a sequence, whose
            state is read by the features that wrote it.
        return_attention_scores: Whether to return the matrix of weights
            too: O(L S) time and memory, for looking.
        use_causal_mask: Whether this call is causal; as `causal`.
        training: Whether dropout is active.

    Masks that Keras carries along with tensors (as of
    `Embedding(mask_zero=True)`) are used beside those that are given, but do
    not cross a `tf.function`: pass them on explicitly there.

    Returns:
        Tensor of shape `(B, L, output width)` in the compute dtype. With
        `return_attention_scores` also the weights, `(B, H, L, S)`, whose
        rows sum to 1. With `return_state` also the state, a flat dict of
        tensors, as of `keras_performer.ops.causal_kernel_attention`.
        Features and sums are computed in float32 under every dtype policy
        (float64 under float64), and a state has that dtype.

    Raises:
        ValueError: If an argument has a wrong value, shapes or masks do not
            fit, or causal attention is asked for queries and keys of
            different lengths.
        TypeError: If an argument has a wrong type.

    Example:

    >>> layer = keras_performer.PerformerAttention(8, 64, causal=True)
    >>> y = layer(keras.random.normal((1, 4096, 512)))
    >>> y.shape
    (1, 4096, 512)

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        value_dim=None,
        feature_map="favor+",
        num_features=256,
        causal=False,
        redraw_interval=None,
        local_window=None,
        chunk_size=None,
        rotary=False,
        dropout=0.0,
        use_bias=True,
        output_shape=None,
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
        arguments.check_integer("num_heads", num_heads)
        arguments.check_integer("key_dim", key_dim)
        arguments.check_integer("value_dim", value_dim, optional=True)
        arguments.check_integer("num_features", num_features)
        arguments.check_integer("chunk_size", chunk_size, optional=True)
        arguments.check_integer("local_window", local_window, 0, optional=True)
        arguments.check_boolean("causal", causal)
        arguments.check_boolean("rotary", rotary)
        arguments.check_boolean("use_bias", use_bias)
        arguments.check_rate("dropout", dropout)
        arguments.check_integer(
            "redraw_interval", redraw_interval, optional=True
        )
        feature_map = feature_maps.get(feature_map)
        # Here, and not when the layer is built, a map refuses such sizes.
        feature_map.weight_specs(num_heads, num_features, key_dim)
        rows = feature_map.projection_shape(num_features, key_dim)
        if redraw_interval and not rows:
            raise arguments.invalid(
                "redraw_interval",
                "None for a feature map that draws no projection, as "
                + type(feature_map).__name__,
                redraw_interval,
            )
        _check_window(local_window, feature_map, causal)
        if rotary and key_dim % 2:
            raise arguments.invalid(
                "key_dim", "an even number with rotary=True", key_dim
            )
        # A state keeps its float32 under every policy: `call` casts the rest.
        super().__init__(
            activity_regularizer=activity_regularizer,
            autocast=False,
            **kwargs,
        )
        self.supports_masking = True
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.feature_map = feature_map
        self.num_features = num_features
        self.causal = causal
        self.redraw_interval = redraw_interval
        self.local_window = local_window
        self.chunk_size = chunk_size
        self.rotary = rotary
        self.dropout = dropout
        self.use_bias = use_bias
        self._output_shape = _check_output_shape(output_shape)
        self.seed = arguments.get_seed(seed)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self._init_feature_state()
        self._probe = None  # a function while `callbacks` looks into calls

    @property
    def output_shape(self):
        """The argument; once built, the shape of the output.

        Keras's `summary()` prints the attribute of this name as the latter.
        """
        if self.built and self._build_shapes_dict:
            return self.compute_output_shape(**self._build_shapes_dict)
        return self._output_shape

    def build(self, query_shape, value_shape=None, key_shape=None):
        """Creates the weights.

        Args:
            query_shape: `(B, L, width)`; B and L may be `None`.
            value_shape: `(B, S, width)`; `None`: the query's.
            key_shape: `(B, S, width)`; `None`: the value's.
        """
        value_shape = query_shape if value_shape is None else value_shape
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        self._input_widths = {
            "query": query_shape[-1],
            "key": key_shape[-1],
            "value": value_shape[-1],
        }
        value_dim = self.value_dim or self.key_dim
        heads = {"query": self.key_dim, "key": self.key_dim}
        heads["value"] = value_dim
        shapes = (query_shape, key_shape, value_shape)
        for index, (name, width) in enumerate(heads.items()):
            dense = self._dense(
                index,
                "abc,cde->abde",
                (None, self.num_heads, width),
                bias_axes="de",
                name=name,
            )
            dense.build(shapes[index])
            setattr(self, name, dense)
        output = self._output_shape or query_shape[-1:]
        output = (output,) if isinstance(output, int) else tuple(output)
        axes = string.ascii_lowercase[4 : 4 + len(output)]
        self.attention_output = self._dense(
            3,
            f"abcd,cd{axes}->ab{axes}",
            (None, *output),
            bias_axes=axes,
            name="attention_output",
        )
        self.attention_output.build(
            (*query_shape[:2], self.num_heads, value_dim)
        )
        self._dropout_generator = arguments.dropout_generator(
            self.dropout, self.seed
        )
        self._add_feature_state()

    def _dense(self, index, equation, output_shape, bias_axes, name):
        with parts_scope():
            dense = keras.layers.EinsumDense(
                equation,
                output_shape=output_shape,
                bias_axes=bias_axes if self.use_bias else None,
                kernel_initializer=arguments.distinct_initializer(
                    self.kernel_initializer, index
                ),
                bias_initializer=arguments.distinct_initializer(
                    self.bias_initializer, index
                ),
                kernel_regularizer=self.kernel_regularizer,
                bias_regularizer=self.bias_regularizer,
                kernel_constraint=self.kernel_constraint,
                bias_constraint=self.bias_constraint,
                dtype=self.dtype_policy,
                name=name,
            )
        # It acts on each token alone; Keras would warn that it drops masks.
        dense.supports_masking = True
        return dense

    def call(
        self,
        query,
        value=None,
        key=None,
        *,
        mask=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        initial_state=None,
        return_state=False,
        return_attention_scores=False,
        use_causal_mask=False,
        training=None,
    ):
        check_mask_argument(mask, value)
        causal = self.causal or use_causal_mask
        stateful = initial_state is not None or return_state
        if stateful:
            self._check_stateful(causal, return_attention_scores)
            arguments.check_position(initial_state, query.shape[0])
        self._step(training, initial_state)
        masks = [value_mask, key_mask]
        if value is None:
            masks += [mask, query_mask]
        self_attention = value is None
        shapes = self._call_shapes(query, value, key)
        self._check_shapes(*shapes, causal=causal)
        source = shapes[1][:2]
        if query_mask is not None:
            query_mask = boolean_mask(query_mask)
            check_key_mask(query_mask.shape, shapes[0][:2], "query_mask")
        key_mask = combined_key_mask(masks, attention_mask, source)
        value = query if value is None else value
        key = value if key is None else key
        query, key, value = (
            ops.cast(x, self.compute_dtype) for x in (query, key, value)
        )
        query = self.query(query)  # [B, L, H, D]
        key = self.key(key)  # [B, S, H, D]
        value = self.value(value)  # [B, S, H, E]
        if self.rotary:
            positions = None
            if stateful:
                first = (initial_state or {}).get("position", 0)
                positions = state_positions(first, query, key_mask)
            query = rotary_embedding(query, positions)
            key = rotary_embedding(key, positions)
        valid = key_mask if self_attention else query_mask
        if self._observes(training):
            self._observe(
                self._scaled(query), self._scaled(key), valid, key_mask
            )
        if self._probe is not None:
            self._probe((query, key, value, valid, key_mask, causal))
        if stateful:
            output, state = self._attend(
                query,
                key,
                value,
                key_mask,
                causal,
                initial_state=initial_state,
                return_state=True,
            )
        elif return_attention_scores:
            scores = self._scores(query, key, key_mask, causal)
            value = ops.cast(value, scores.dtype)
            if key_mask is not None:
                keep = key_mask[:, :, None, None]
                value = ops.where(keep, value, ops.zeros_like(value))
            output = ops.einsum("bhij,bjhe->bihe", scores, value)
            output = ops.cast(output, self.compute_dtype)
            scores = ops.cast(scores, self.compute_dtype)
        else:
            output = self._attend(query, key, value, key_mask, causal)
        output = self.attention_output(output)
        if training and self.dropout:
            output = drop(output, self.dropout, self._dropout_generator)
        if return_state:
            return output, state
        return (output, scores) if return_attention_scores else output

    def _dropout_generators(self):
        return [self._dropout_generator] if self.dropout else []

    def _check_stateful(self, causal, return_attention_scores):
        """Raises where a call cannot continue a sequence or be continued."""
        reason = None
        if not causal:
            reason = "need causal attention, as causal=True."
        elif isinstance(self.feature_map, feature_maps.Exact):
            reason = (
                'need a feature map: the state of "exact" attention would '
                "hold all keys and values, and grow with each token."
            )
        elif return_attention_scores:
            reason = "cannot go with `return_attention_scores`."
        elif self.activity_regularizer is not None:
            raise no_regularized_state(self.name)
        if reason:
            raise ValueError(
                f"{self.name}: `initial_state` and `return_state` {reason}"
            )

    def get_initial_state(self, batch_size):
        """The state of an empty prefix.

        Args:
            batch_size: Number of sequences, B.

        Returns:
            A flat dict of tensors; see `causal_kernel_attention` of
            `keras_performer.ops` for its parts.

        Raises:
            ValueError: If the layer is not built or not causal, or its
                feature map is "exact", which has no state of a fixed size.
        """
        self._check_stateful(self.causal, False)
        if not self.built:
            raise ValueError(
                f"{self.name} is not built yet: its state depends on its "
                "weights. Call it, or its `build`, first."
            )
        return self._empty_state(batch_size)

    def _empty_state(self, batch_size):
        shape = (batch_size, 1, self.num_heads)
        query = self._scaled(ops.zeros((*shape, self.key_dim)))
        width = self.value_dim or self.key_dim
        return attention_ops.initial_state(
            query,
            ops.zeros((*shape, width), dtype=query.dtype),
            feature_map=self.feature_map,
            projection=self.projection,
            weights=self._feature_weights,
            local_window=self._window(),
        )

    def _state_spec(self, batch):
        state = self._empty_state(1)
        return {
            name: keras.KerasTensor((batch, *x.shape[1:]), dtype=x.dtype)
            for name, x in state.items()
        }

    def _attend(self, query, key, value, key_mask, causal, **state):
        if isinstance(self.feature_map, feature_maps.Exact):
            return attention_ops.exact_attention(
                query, key, value, key_mask, causal=causal
            )
        query, key = self._scaled(query), self._scaled(key)
        kwargs = {
            "feature_map": self.feature_map,
            "projection": self.projection,
            "weights": self._feature_weights,
            "chunk_size": self.chunk_size,
        }
        if not causal:
            return attention_ops.kernel_attention(
                query, key, value, key_mask, **kwargs
            )
        return attention_ops.causal_kernel_attention(
            query,
            key,
            value,
            key_mask,
            local_window=self._window(),
            **kwargs,
            **state,
        )

    def _scores(self, query, key, key_mask, causal):
        exact = isinstance(self.feature_map, feature_maps.Exact)
        return attention_ops.attention_scores(
            self._scaled(query),
            self._scaled(key),
            key_mask,
            feature_map=None if exact else self.feature_map,
            projection=self.projection,
            weights=self._feature_weights,
            causal=causal,
            local_window=self._window() if causal else 0,
        )

    def _scaled(self, x):
        """Queries and keys as feature maps take them, at core precision."""
        dtype = "float64" if self.compute_dtype == "float64" else "float32"
        return ops.cast(x, dtype) * self.key_dim**-0.25

    def _window(self):
        """The local window of a causal call."""
        if self.local_window is not None:
            return self.local_window
        return DEFAULT_LOCAL_WINDOW if self.feature_map.allows_window else 0

    def _call_shapes(self, query, value, key):
        if isinstance(query, (list, tuple)):
            raise ValueError(
                f"{self.name} takes tensors as separate arguments, "
                "layer(query, value, key), or one for self-attention. "
                f"Received: a {type(query).__name__} of {len(query)}"
            )
        if value is None and key is not None:
            raise ValueError(
                f"{self.name} received `key` without `value`. Call it as "
                "layer(query, value, key), or with one tensor for "
                "self-attention."
            )
        value_shape = query.shape if value is None else value.shape
        key_shape = value_shape if key is None else key.shape
        return query.shape, value_shape, key_shape

    def _check_shapes(self, query, value, key, causal=False):
        shapes = {"query": query, "value": value, "key": key}
        for name, shape in shapes.items():
            if shape and isinstance(shape[0], (list, tuple)):
                raise ValueError(
                    f"{self.name} takes tensors as separate arguments, "
                    "layer(query, value, key), or one for self-attention. "
                    f"Received shapes: {shape}"
                )
            if len(shape) != 3 or shape[-1] is None:
                raise ValueError(
                    f"{self.name} expected `{name}` of shape (batch, length, "
                    "width) with a known width. Received: "
                    f"{name}.shape={tuple(shape)}"
                )
            if self.built and shape[-1] != self._input_widths[name]:
                raise ValueError(
                    f"{self.name} was built for a `{name}` of width "
                    f"{self._input_widths[name]}. Received: "
                    f"{name}.shape={tuple(shape)}"
                )
        if differ(value[1], key[1]):
            raise ValueError(
                f"{self.name} needs one value for each key. Received: "
                f"value.shape={tuple(value)} and key.shape={tuple(key)}"
            )
        if (causal or self.causal) and differ(query[1], key[1]):
            raise ValueError(
                f"{self.name} is causal: query i sees keys j <= i, which "
                "needs queries and keys of equal length. Received: query "
                f"length {query[1]} and key length {key[1]}"
            )

    def compute_mask(self, inputs, previous_mask=None):
        """The mask of the query, as a boolean tensor, goes with the output."""
        if previous_mask is None:
            return None
        return boolean_mask(previous_mask)

    def compute_output_shape(
        self, query_shape, value_shape=None, key_shape=None
    ):
        output = self._output_shape or query_shape[-1:]
        output = (output,) if isinstance(output, int) else tuple(output)
        return (*query_shape[:2], *output)

    def compute_output_spec(
        self,
        query,
        value=None,
        key=None,
        *,
        mask=None,
        attention_mask=None,
        initial_state=None,
        return_state=False,
        return_attention_scores=False,
        use_causal_mask=False,
        training=None,
        **masks,
    ):
        check_mask_argument(mask, value)
        if initial_state is not None or return_state:
            self._check_stateful(
                self.causal or use_causal_mask, return_attention_scores
            )
        shapes = self._call_shapes(query, value, key)
        self._check_shapes(*shapes, causal=use_causal_mask)
        if attention_mask is not None:
            check_factored_mask(mask_shape(attention_mask), shapes[1][:2])
        for name, given in {"mask": mask, **masks}.items():
            if given is not None:
                source = shapes[0 if name == "query_mask" else 1][:2]
                check_key_mask(mask_shape(given), source, name)
        output = keras.KerasTensor(
            self.compute_output_shape(*shapes), dtype=self.compute_dtype
        )
        if return_state:
            return output, self._state_spec(shapes[0][0])
        if not return_attention_scores:
            return output
        scores = (shapes[0][0], self.num_heads, shapes[0][1], shapes[1][1])
        return output, keras.KerasTensor(scores, dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "feature_map": feature_maps.serialize(self.feature_map),
            "num_features": self.num_features,
            "causal": self.causal,
            "redraw_interval": self.redraw_interval,
            "local_window": self.local_window,
            "chunk_size": self.chunk_size,
            "rotary": self.rotary,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "output_shape": self._output_shape,
            "seed": arguments.serialize_seed(self.seed),
            **arguments.serialize_weight_options(self),
        }


def no_regularized_state(name):
    """The error of a layer that shall give a state, and is regularized."""
    return ValueError(
        f"{name}: `initial_state` and `return_state` cannot go with "
        "`activity_regularizer`: Keras would regularize the state as well."
    )


def _check_window(local_window, feature_map, causal):
    if not local_window:
        return
    if not feature_map.allows_window:
        raise arguments.invalid(
            "local_window",
            "0 or None for a feature map that does not estimate the softmax "
            f"kernel, as {type(feature_map).__name__}",
            local_window,
        )
    if not causal:
        raise arguments.invalid(
            "local_window", "0 or None with causal=False", local_window
        )


def _check_output_shape(output_shape):
    if output_shape is None:
        return None
    widths = output_shape
    if isinstance(output_shape, int):
        widths = (output_shape,)
    elif isinstance(output_shape, list):
        output_shape = tuple(output_shape)
    good = isinstance(widths, (list, tuple)) and len(widths) > 0
    if not good or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0
        for n in widths
    ):
        raise arguments.invalid(
            "output_shape",
            "a positive integer, a tuple of them, or None",
            output_shape,
        )
    return output_shape
