"""A language model of Performer blocks."""

import math

import keras
import numpy as np
from keras import activations
from keras import ops

from keras_performer import arguments
from keras_performer import feature_maps
from keras_performer.layers.embeddings import TokenAndPositionEmbedding
from keras_performer.layers.embeddings import state_positions
from keras_performer.layers.masks import boolean_mask
from keras_performer.layers.performer_block import PerformerBlock
from keras_performer.layers.steps import parts_scope
from keras_performer.models.generation import Generation
from keras_performer.ops.chunks import LOG_ZERO

POSITIONS = ("rotary", "learned", "sine", None)


@keras.saving.register_keras_serializable(package="keras_performer")
class PerformerLM(Generation, keras.Model):
    """Logits for each token of a sequence: text, pixels, proteins.

    An embedding, `num_layers` blocks that normalise first, a last layer
    norm, and logits. A causal model predicts the next token, and
    `generate` continues a sequence at a cost for each token that does not
    grow with the position; with `causal=False` every token sees all others,
    as for masked tokens.

    Layers are `embedding`, `block_0`, `block_1`, ..., `final_norm` and, with
    `tie_embeddings=False`, `head`.

    Args:
        vocabulary_size: Number of tokens, V.
        num_layers: Number of blocks.
        num_heads: Attention heads of each block.
        hidden_dim: Width of the model, a multiple of `num_heads`.
        intermediate_dim: Width of the feed-forward networks' inner layer.
        sequence_length: Longest sequence, for learned positions; others take
            any length.
        causal: Whether a token sees only itself and those before.
        feature_map: See `keras_performer.PerformerAttention`.
        num_features: Features for each head, M.
        position: "rotary" (queries and keys are rotated), "learned", "sine"
            or `None`.
        tie_embeddings: Whether the logits multiply by the transposed token
            embedding, or by a `head` of their own.
        reversible: Must be `False`: not supported by this version.
        dropout: Rate of dropout on the output of both parts of each block.
        redraw_interval: See `keras_performer.PerformerAttention`, as for the
            next two.
        local_window: W, near tokens seen exactly by causal softmax maps.
        chunk_size: Tokens for each step of the causal scan.
        activation: Activation of the feed-forward networks.
        layer_norm_epsilon: Epsilon of the layer norms.
        seed: Integer or `keras.random.SeedGenerator`; blocks count up from
            an integer. `None` draws one for each.
        dtype: Dtype policy of all layers. Logits are computed in float32
            under every policy (float64 under float64), where the likeliest
            tokens do not tie.
        grid: Sizes of the axes of an image or a volume, for learned
            positions; see `keras_performer.TokenAndPositionEmbedding`.
        mask_zero: Whether token 0 is padding, which no token sees. A causal
            model needs it only where padding stands before tokens.
        **kwargs: `name` and `trainable`.

    Call arguments:
        inputs: Integer tokens of shape `(B, L)`.
        training: Whether dropout is active.
        mask: Mask of shape `(B, L)`; true keeps a token as a key.

    Returns:
        float32 logits of shape `(B, L, V)` (float64 under float64).

    Raises:
        ValueError: If an argument has a wrong value.
        TypeError: If an argument has a wrong type.

    Example:

    >>> model = keras_performer.models.PerformerLM(256, 2, 4, 64, 256, 1024)
    >>> model(np.array([[1, 2, 3]])).shape
    (1, 3, 256)
    >>> model.generate([[1, 2, 3], [4]], max_new_tokens=5).shape
    (2, 5)

    Reference:

    - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    """

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        num_heads,
        hidden_dim,
        intermediate_dim,
        sequence_length,
        causal=True,
        feature_map="favor+",
        num_features=256,
        position="rotary",
        tie_embeddings=True,
        reversible=False,
        dropout=0.0,
        redraw_interval=None,
        local_window=None,
        chunk_size=None,
        activation="gelu",
        layer_norm_epsilon=1e-5,
        seed=None,
        dtype=None,
        grid=None,
        mask_zero=False,
        **kwargs,
    ):
        _check_sizes(num_layers, num_heads, hidden_dim)
        arguments.check_choice("position", position, POSITIONS)
        arguments.check_boolean("causal", causal)
        arguments.check_boolean("tie_embeddings", tie_embeddings)
        arguments.check_boolean("reversible", reversible)
        if reversible:
            raise arguments.invalid(
                "reversible", "False in this version", reversible
            )
        dtype = keras.dtype_policies.get(dtype)
        seed = arguments.get_seed(seed)
        feature_map = feature_maps.get(feature_map)
        rotary = position == "rotary"
        precise = "float64" if dtype.compute_dtype == "float64" else "float32"

        # Layers.
        with parts_scope():
            self.embedding = TokenAndPositionEmbedding(
                vocabulary_size,
                sequence_length,
                hidden_dim,
                position=None if rotary else position,
                mask_zero=mask_zero,
                grid=grid,
                reverse_dtype=precise,
                dtype=dtype,
                name="embedding",
            )
        self.blocks = _blocks(
            num_layers,
            seed,
            num_heads=num_heads,
            intermediate_dim=intermediate_dim,
            feature_map=feature_map,
            num_features=num_features,
            causal=causal,
            redraw_interval=redraw_interval,
            local_window=local_window,
            chunk_size=chunk_size,
            rotary=rotary,
            dropout=dropout,
            activation=activation,
            layer_norm_epsilon=layer_norm_epsilon,
            dtype=dtype,
        )
        with parts_scope():
            self.final_norm = keras.layers.LayerNormalization(
                epsilon=layer_norm_epsilon, dtype=dtype, name="final_norm"
            )
            self.head = None
            if not tie_embeddings:
                self.head = keras.layers.Dense(
                    vocabulary_size, dtype=precise, name="head"
                )

            # Functional model; its operations on masks are parts, too.
            ids = keras.Input((None,), dtype="int32", name="ids")
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            super().__init__(ids, self._predict(x), **kwargs)
        # The blocks take the mask of a call; Keras would warn all the same.
        self.supports_masking = True

        # Config.
        self.dtype_policy = dtype
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.sequence_length = sequence_length
        self.causal = causal
        self.feature_map = feature_map
        self.num_features = num_features
        self.position = position
        self.grid = self.embedding.grid
        self.mask_zero = mask_zero
        self.tie_embeddings = tie_embeddings
        self.reversible = reversible
        self.dropout = dropout
        self.redraw_interval = redraw_interval
        self.local_window = local_window
        self.chunk_size = chunk_size
        self.activation = activations.get(activation)
        self.layer_norm_epsilon = layer_norm_epsilon
        self.seed = seed

    def rematerialized_call(self, layer_call, *args, **kwargs):
        """Keras's hook: each block computes its activations again.

        All of them at once would save nothing.
        """
        return layer_call

    def call(self, inputs, training=None, mask=None):
        if self.mask_zero and mask is not None:
            # A functional model's own mask would take the place of this one.
            inputs = ops.where(boolean_mask(mask), inputs, 0)
            mask = None
        return super().call(inputs, training=training, mask=mask)

    def _predict(self, x):
        """Logits of the last block's output."""
        x = self.final_norm(x)
        if self.head is None:
            return self.embedding(x, reverse=True)
        return self.head(x)

    def get_initial_state(self, batch_size):
        """The state of an empty sequence, for `step`.

        Args:
            batch_size: Number of sequences, B.

        Returns:
            A flat dict of tensors: those of each block, and `"position"`.
            Their size does not depend on how many tokens they have seen.

        Raises:
            ValueError: If the model is not causal, or its feature map is
                "exact", whose state would grow.
        """
        state = {}
        for block in self.blocks:
            for name, value in block.get_initial_state(batch_size).items():
                shared = name == "position"
                state[name if shared else f"{block.name}_{name}"] = value
        return state

    def step(self, ids, state, mask=None, training=False):
        """Continues sequences by one or more tokens.

        Works eagerly, in a `tf.function` and under XLA. The state that is
        given is not changed. Gradients flow through it, so that a sequence
        longer than the memory can be trained on segment by segment.

        Args:
            ids: Integer tokens of shape `(B, L)`.
            state: State of all tokens before these: of
                `get_initial_state`, or of the last `step`.
            mask: Mask of shape `(B, L)`, or `None`. A masked token leaves
                the state of its row as it is; its logits mean nothing.
            training: Whether dropout is active.

        Returns:
            Logits of shape `(B, L, V)`, and the state after these tokens.
            Beyond `sequence_length` learned positions are NaN, and so are
            the logits.

        Raises:
            ValueError: If the state is not one of this model.
        """
        x, state = self._advance(ids, state, mask, training)
        return self._predict(x), state

    def fade(self, state, count, half_life):
        """Lets what lies beyond the local window weigh less from now on.

        A model trained on sequences of L tokens has never met more than L of
        them: in longer ones the far part adds up until it drowns what is
        near. Called before each segment of `count` tokens, with a half-life
        of L / 2 or less, this keeps the far part as large as in training. The
        result depends on where segments begin, and the shorter they are, the
        more evenly it fades.

        Args:
            state: As for `step`.
            count: Number of tokens that are read next, or a tensor `(B,)` of
                them.
            half_life: Number of tokens, or a scalar tensor: all that is not
                in the window is multiplied by `0.5 ** (count / half_life)`.
                There is no gradient with respect to either. `None`: nothing
                fades.

        Returns:
            The new state. Tokens of the window, and positions, are as before.

        Raises:
            ValueError: If `count` is a number below 0, or `half_life` one
                that is not above 0; tensors are not looked into.
        """
        count = _finite("count", count)
        if half_life is None:
            return state
        half_life = _finite("half_life", half_life, above=True)

        def logarithm(value):
            """Of the factor, for each row, in the shape of `value`."""
            first, second = (
                ops.cast(x, value.dtype) for x in (count, half_life)
            )
            column = ops.reshape(
                -math.log(2.0) * first / second,
                (-1,) + (1,) * (len(value.shape) - 1),
            )
            return ops.stop_gradient(column)

        # Of features in log space the shift says how large the sums are. They
        # themselves stay near 1, as attention and its gradient need them.
        in_log_space = self.feature_map.log_space
        state = dict(state)
        for name, value in state.items():
            if name.endswith("_shift") and in_log_space:
                faded = ops.maximum(value + logarithm(value), LOG_ZERO)
            elif name.endswith(("_sums", "_normalizer")) and not in_log_space:
                faded = value * ops.exp(logarithm(value))
            else:
                continue
            state[name] = faded
        return state

    def _advance(self, ids, state, mask=None, training=False):
        """The last block's output `[B, L, hidden_dim]`, and the new state."""
        if "_state_names" not in self.__dict__:
            self._state_names = tuple(sorted(self.get_initial_state(1)))
        names = tuple(sorted(state)) if isinstance(state, dict) else state
        if names != self._state_names:
            raise ValueError(
                "Received an invalid value for argument `state`, expected a "
                "dict as `get_initial_state` or `step` of this model "
                f"returns, of {self._state_names}. Received: {names}"
            )
        ids = ops.convert_to_tensor(ids)
        if mask is not None:
            mask = ops.cast(mask, "bool")
        mask = self.embedding.compute_mask(ids, mask)
        position = state["position"]
        positions = state_positions(position, ids, mask)
        x = self.embedding(ids, positions=positions)
        new = {}
        for block in self.blocks:
            own = {
                name.removeprefix(block.name + "_"): value
                for name, value in state.items()
                if name.startswith(block.name + "_")
            }
            x, own = block(
                x,
                mask=mask,
                initial_state={**own, "position": position},
                return_state=True,
                training=training,
            )
            new["position"] = own.pop("position")
            for name, value in own.items():
                new[f"{block.name}_{name}"] = value
        return x, new

    def get_config(self):
        frozen = [
            layer.path
            for layer in self._flatten_layers(include_self=False)
            if not layer.trainable
        ]
        return {
            # No argument, and only there where it says something.
            **({"frozen": frozen} if frozen else {}),
            "name": self.name,
            "trainable": self.trainable,
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
            "vocabulary_size": self.vocabulary_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "hidden_dim": self.hidden_dim,
            "intermediate_dim": self.intermediate_dim,
            "sequence_length": self.sequence_length,
            "causal": self.causal,
            "feature_map": feature_maps.serialize(self.feature_map),
            "num_features": self.num_features,
            "position": self.position,
            "grid": self.grid,
            "mask_zero": self.mask_zero,
            "tie_embeddings": self.tie_embeddings,
            "reversible": self.reversible,
            "dropout": self.dropout,
            "redraw_interval": self.redraw_interval,
            "local_window": self.local_window,
            "chunk_size": self.chunk_size,
            "activation": activations.serialize(self.activation),
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "seed": arguments.serialize_seed(self.seed),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        frozen = config.pop("frozen", ())
        with keras.saving.custom_object_scope(custom_objects or {}):
            model = cls(**config)
        for layer in model._flatten_layers(include_self=False):
            if layer.path in frozen:
                layer.trainable = False
        return model


def _finite(name, value, above=False):
    """A tensor, or numbers as an array; raises where these are wrong."""
    if ops.is_tensor(value) or isinstance(value, keras.KerasTensor):
        return value
    try:
        array = np.asarray(value)
        good = array.dtype.kind in "iufO"
        array = array.astype("float64")
    except (TypeError, ValueError, OverflowError):
        good = False
    if good:
        good = np.all(array > 0 if above else array >= 0)
        good = good and np.all(np.isfinite(array))
    if not good:
        expected = "above 0" if above else "of at least 0"
        raise arguments.invalid(name, f"finite numbers {expected}", value)
    return array


def _check_sizes(num_layers, num_heads, hidden_dim):
    """Raises where a block alone would not, or not name the argument."""
    arguments.check_integer("num_layers", num_layers)
    arguments.check_integer("num_heads", num_heads)
    arguments.check_integer("hidden_dim", hidden_dim)
    if hidden_dim % num_heads:
        raise arguments.invalid(
            "hidden_dim", f"a multiple of num_heads={num_heads}", hidden_dim
        )


def _blocks(num_layers, seed, **options):
    """Blocks of the same options, whose seeds count up from an integer."""
    return [
        PerformerBlock(
            seed=seed + index if isinstance(seed, int) else seed,
            name=f"block_{index}",
            **options,
        )
        for index in range(num_layers)
    ]
