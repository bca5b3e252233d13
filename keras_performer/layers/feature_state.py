"""What a layer keeps for its feature map: projection, weights, statistics."""

import random
import weakref

import keras
from keras import ops

from keras_performer.layers.steps import TrainingSteps
from keras_performer.layers.steps import redraw_if_due
from keras_performer.ops.projections import StepSeed

# Share that running statistics of the inputs keep at each training step.
STATISTICS_MOMENTUM = 0.99
# Keeps redraws apart from dropout, whose masks may have the same seed and
# count: the golden ratio in 31 bits.
REDRAW = 0x4F1BBCDC
# Layers that have taken their seed from a generator, for each generator: those
# that share one draw apart.
_layers_of = weakref.WeakKeyDictionary()


class FeatureState(TrainingSteps):
    """Mixin of `PerformerAttention`: the state behind its feature map.

    The layer has the attributes `feature_map`, `num_heads`, `num_features`,
    `key_dim`, `redraw_interval` and `seed`.
    """

    def _init_feature_state(self):
        # The global generator of Keras cannot serve: its own state may not
        # exist yet where weights are created. Its seed sets this one.
        first = self.seed
        if first is None:
            first = random.randint(1, 10**9)
        if isinstance(self.seed, keras.random.SeedGenerator):
            # Its own state cannot be read where a layer is made in a graph.
            count = _layers_of.get(self.seed, 0)
            _layers_of[self.seed] = count + 1
            first = self.seed.get_config()["seed"] + count * REDRAW
        self._projection_seed = first % 2**31
        self._draws_by_hand = 0
        self.projection = None
        self._feature_weights = {}
        self._observed = self._statistics = None
        self._calibrating = False

    def _add_feature_state(self):
        self.projection = self._add_projection()
        self._add_feature_weights()

    def _add_projection(self):
        shape = self.feature_map.projection_shape(
            self.num_features, self.key_dim
        )
        if shape is None:
            return None
        # Always float32: rows of a half-precision draw are not orthogonal.
        # Replicas hold one and the same; a mean over them means nothing.
        return self.add_weight(
            name="projection",
            shape=shape,
            initializer=lambda shape, dtype: ops.cast(
                self._draw(self._projection_seed), dtype
            ),
            dtype="float32",
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
        )

    def _add_feature_weights(self):
        """The feature map's own weights and statistics, redraw's state."""
        first_seed = self._projection_seed
        specs = self.feature_map.weight_specs(
            self.num_heads, self.num_features, self.key_dim, first_seed
        )
        self._feature_weights = {
            name: self._add_core_weight(name, *spec)
            for name, spec in specs.items()
        }
        width = self.feature_map.statistics_width(self.key_dim)
        if width:
            # Sums over the tokens of queries and of keys, and their number:
            # of the last step, which replicas add up, and of all, fading.
            shape = (2, self.num_heads, width + 1)
            self._observed = self._add_core_weight(
                "observed", shape, aggregation="sum"
            )
            self._statistics = self._add_core_weight("statistics", shape)
        if self.redraw_interval is not None:
            self._redraw_state = self.add_weight(
                name="redraw_state",
                shape=(2,),
                initializer=lambda shape, dtype: ops.convert_to_tensor(
                    [first_seed ^ REDRAW, 0], dtype=dtype
                ),
                dtype="int32",
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",
            )

    def _add_core_weight(
        self,
        name,
        shape,
        initializer="zeros",
        trainable=False,
        aggregation="only_first_replica",
    ):
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=initializer,
            dtype="float32",
            trainable=trainable,
            autocast=False,
            aggregation=None if trainable else aggregation,
        )

    def redraw_projection(self, seed=None):
        """Draws a new projection at once.

        In a compiled function it would draw the same one at every run: call
        it outside, or use `redraw_interval`.

        Args:
            seed: Integer; `None` continues a sequence that follows from the
                layer's seed, apart from that of `redraw_interval`. A layer
                that is loaded from a file begins it anew.

        Raises:
            ValueError: If the layer has no projection: it is not built, or
                its feature map draws none.
        """
        if self.projection is None:
            raise ValueError(
                f"{self.name} has no projection to redraw: "
                + (
                    f"{type(self.feature_map).__name__} draws none."
                    if self.built
                    else "it is not built yet."
                )
            )
        if seed is None:
            self._draws_by_hand += 1
            first = self._projection_seed ^ REDRAW
            # Steps count up from 0; these count down from the largest.
            seed = StepSeed([first, 2**31 - self._draws_by_hand])
        self.projection.assign(self._draw(seed))

    def _draw(self, seed):
        return self.feature_map.draw_projection(
            self.num_features, self.key_dim, seed
        )

    def _recomputes_on_jax(self):
        return self._statistics is None

    def _begin_step(self, fresh=None):
        if not self.trainable:
            return  # frozen, as statistics of other layers are
        if self._statistics is not None:
            self._adapt(STATISTICS_MOMENTUM, fresh)
        if self.redraw_interval is not None:
            redraw_if_due(
                self._redraw_state,
                self.projection,
                self.redraw_interval,
                self._draw,
                fresh,
            )

    def _adapt(self, momentum, fresh=None):
        """Sets the feature map's weights as the tokens seen so far say.

        Nothing changes where the tensor `fresh` is false.
        """
        observed = ops.convert_to_tensor(self._observed)
        # A step that overflowed is left out, as by a loss-scaling optimizer.
        observed = ops.where(
            ops.all(ops.isfinite(observed)), observed, ops.zeros_like(observed)
        )
        before = ops.convert_to_tensor(self._statistics)
        sums = momentum * before + observed
        if fresh is not None:
            sums = ops.where(fresh, sums, before)
        self._statistics.assign(sums)
        # Or a step that does not come here would count twice.
        self._observed.assign(ops.zeros_like(sums))
        counts = sums[..., -1:]  # [2, H, 1]
        some = ops.all(counts > 0)
        if fresh is not None:
            some = ops.logical_and(some, fresh)
        means = sums[..., :-1] / ops.where(counts > 0, counts, 1.0)
        old = {
            name: ops.convert_to_tensor(weight)
            for name, weight in self._feature_weights.items()
        }
        new = self.feature_map.adapt(means[0], means[1], old)
        for name, value in new.items():
            value = ops.where(some, value, old[name])
            self._feature_weights[name].assign(value)

    def _observes(self, training):
        """Whether a call takes its tokens into the statistics."""
        if self._statistics is None:
            return False
        return self._calibrating or (training and self.trainable)

    def _observe(self, query, key, query_mask, key_mask):
        """Keeps what this step saw until the next step begins.

        Of several calls in one step, the last.
        """
        self._observed.assign(
            ops.stack(
                [
                    self._sum_of_valid(query, query_mask),
                    self._sum_of_valid(key, key_mask),
                ]
            )
        )

    def _sum_of_valid(self, x, mask):
        """Sums over valid tokens, and their number: `[H, width + 1]`."""
        x = ops.cast(ops.stop_gradient(x), "float32")
        x = self.feature_map.observe(x)  # [B, L, H, width]
        valid = ops.ones_like(x[..., :1])
        if mask is not None:
            valid = valid * ops.cast(mask, "float32")[:, :, None, None]
            x = ops.where(valid > 0, x, 0.0)
        x = ops.concatenate([x, valid], axis=-1)
        return ops.sum(x, axis=(0, 1))

    def calibrate(self, data):
        """Sets the statistics of an adaptive feature map without training.

        For the layers of a whole model, use `keras_performer.calibrate`.

        Args:
            data: Input of the layer, or an iterable of such inputs (for
                instance a `tf.data.Dataset`): one pass.

        Raises:
            ValueError: If the feature map does not adapt to its inputs.
        """
        calibrate(self, data)


def calibrate(model, data):
    """Sets the statistics of adaptive feature maps without training.

    Every `PerformerAttention` of the model whose map adapts to its inputs
    ("favor++", "favor#") forgets what it knew and takes the mean over one
    pass, in inference mode.

    Args:
        model: A built model or layer.
        data: A tensor or dict, the input of the model, or an iterable of
            inputs, with labels beside them or not (for instance a
            `tf.data.Dataset`, or a list of batches): one pass.

    Raises:
        ValueError: If no layer's feature map adapts to its inputs, or there
            is no data, or its queries or keys are not finite.
    """
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, FeatureState) and layer._statistics is not None
    ]
    if not layers:
        raise ValueError(
            f"{model.name} has no built layer with a feature map that adapts "
            'to its inputs, as "favor++" and "favor#" do.'
        )
    single = hasattr(data, "shape") or isinstance(data, dict)
    batches = iter([data] if single else data)
    batch = next(batches, None)
    if batch is None:
        raise ValueError(
            "Received an invalid value for argument `data`, expected at "
            f"least one batch. Received: data={data!r}"
        )
    for layer in layers:
        for weight in (layer._statistics, layer._observed):
            weight.assign(ops.zeros(weight.shape, dtype=weight.dtype))
        layer._calibrating = True
    try:
        while batch is not None:
            if isinstance(batch, tuple):  # with labels, as for `fit`
                batch = keras.utils.unpack_x_y_sample_weight(batch)[0]
            model(batch, training=False)
            for layer in layers:
                if not ops.convert_to_numpy(
                    ops.all(ops.isfinite(layer._observed))
                ):
                    raise ValueError(
                        "Received an invalid value for argument `data`, "
                        "expected queries and keys whose squares are finite. "
                        f"Received: others, in {layer.path}"
                    )
                layer._adapt(momentum=1.0)
            batch = next(batches, None)
    finally:
        for layer in layers:
            layer._calibrating = False
