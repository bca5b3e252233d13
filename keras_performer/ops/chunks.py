"""What a scan computes in one chunk: forward and both gradients.

Sizes: `B` batch, `H` heads, `C` tokens of a chunk (with a local window, a
block of W), `D` key_dim, `M` features, `F` = value_dim + 1, as a column of
ones rides along with the values and gives the normaliser. Where a key is
masked that column is 0, as are the values: it is the mask too.

Two kernels share one contract, used by `causal.py` (the third, without an
order of tokens, is that of `bidirectional.py`):

- `forward(carry, x)` takes `carry = (sums, shift)`, `[B, H, F, M]` (the layout
  whose products are fast) and `[B, H, 1, M]`, of all earlier chunks and
  gives it back with this chunk added, and `(output, normaliser, scale,
  shift before this chunk)`;
- `forward_gradient(carry, x, grad, scale)` visits the chunks in the same
  order: the gradients that depend on what came *before*;
- `backward_gradient(grad_sums, x, grad, scale, shift)` visits them in the
  opposite order: the gradients that depend on what came *after*.

Both compute the features anew, so that nothing of size L x M is stored.
After the gradients of `x` they give those of the feature map's weights, from
this chunk's query features in the first and its key features in the second.
`forward_slots` and `backward_slots` say of which elements of `x` they are,
`lags` which elements are others of the chunk before.
`grad` is the gradient `[B, H, C, F]` with respect to the output before its
normalisation, which is in units of `exp(scale)`.

With log features, `sums` is the true sum times `exp(-shift)`, with one shift
for each feature: the largest logarithm among the keys summed. No stabiliser
looks at a later token, so that the future never changes the past, not even
by rounding. Every stabiliser cancels in the output, so that none of them
has a gradient.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from keras_performer.ops.scan import vjp

# The logarithm of zero. Finite, so that the difference of two is 0, not NaN.
LOG_ZERO = -1e30

# Below its floor a normaliser stands for "no key": output and gradient are 0.
# In log space a row's largest weight is near 1, or 1e-26 at worst: see
# `_log_terms`. Plain features may change sign and cancel; there the floor keeps
# the quotient and its gradient (floor ** -2) finite in float32.
LOG_FLOOR = 1e-30
PLAIN_FLOOR = 1e-12

# Weights inside a chunk are `exp(a) P`: P a product of features that were
# divided by the largest of their token, and exp(a) what that left out. P may
# be as small as exp(-100), so float32's range (exp(-87) to exp(88)) is shared
# out with care:
# - each feature is multiplied by exp(HEADROOM), so that P reaches from
#   exp(2 HEADROOM) times M down to exp(-87);
# - exp(a) is kept times exp(MARGIN), so that a weight of 1e-9 of the largest P
#   still counts;
# - products below exp(LEAST_LOG_PRODUCT) do not raise a row's scale, so that
#   exp(a + MARGIN + HEADROOM), which the gradient meets, stays below exp(78).
HEADROOM = 37.0
MARGIN = 14.0
LEAST_LOG_PRODUCT = -27.0
# A row whose products are all below has a normaliser below 1. Its gradient is
# divided by this much at least, for the same reason; it is too small then.
LEAST_LOG_DIVISOR = 1e-2


def largest(x, axis):
    """Maximum over an axis, kept; of no element, the logarithm of zero."""
    return ops.max(x, axis=axis, keepdims=True, initial=LOG_ZERO)


def add_ones(values):
    """Values `[..., E]` with the column of ones, `[..., F]`."""
    rank = len(values.shape)
    paddings = [(0, 0)] * (rank - 1) + [(0, 1)]
    return ops.pad(values, paddings, constant_values=1)


def normalize(unnormalized, floor):
    """Splits `[..., F]` into the output `[..., E]` and its normaliser."""
    normalizer = unnormalized[..., -1:]
    empty = ops.abs(normalizer) < floor
    safe = ops.where(empty, 1.0, normalizer)
    # The numerator is cleared as well, not only divided by 1: an empty row
    # has output 0 and no gradient, even where its terms underflowed.
    numerator = unnormalized[..., :-1]
    return ops.where(empty, 0.0, numerator) / safe, normalizer


def normalize_gradient(grad, output, normalizer, log_space):
    """Gradient with respect to what `normalize` split, `[..., F]`."""
    floor = LOG_FLOOR if log_space else PLAIN_FLOOR
    empty = ops.abs(normalizer) < floor
    safe = ops.where(empty, 1.0, normalizer)
    if log_space:
        safe = ops.maximum(safe, LEAST_LOG_DIVISOR)
    last = -ops.sum(grad * output, axis=-1, keepdims=True)
    grad = ops.concatenate([grad, last], axis=-1) / safe
    return ops.where(empty, 0.0, grad)


def _outer(a, b):
    return ops.einsum("bhim,bhjm->bhij", a, b)


def _times(weights, rows):
    return ops.einsum("bhij,bhjf->bhif", weights, rows)


def _transposed_times(weights, rows):
    return ops.einsum("bhij,bhif->bhjf", weights, rows)


def _gathered(weights, rows):
    """`weights^T rows` for many weights and few columns of rows.

    On CPUs the product that gives the transposed result is twice as fast.
    """
    return ops.swapaxes(_transposed_times(rows, weights), -1, -2)


def _mask_of(values):
    """The keys' mask `[B, C]`: the column of ones, 0 where one is masked."""
    return values[:, 0, :, -1]


def _lower_triangle(size):
    index = ops.arange(size)
    return index[:, None] >= index[None, :]  # [C, C]


def _masked(mask, x, fill):
    """`x` `[B, H, C, M]` where the keys' mask `[B, C]` is set, else `fill`."""
    return ops.where(mask[:, None, :, None] > 0, x, fill)


class BoundMap:
    """A feature map together with its weights, a dict of tensors."""

    def __init__(self, feature_map, weights=None):
        self.feature_map = feature_map
        self.weights = weights or {}
        self.log_space = feature_map.log_space

    def __call__(self, x, projection=None, is_query=True):
        # A map without weights need not know of the argument.
        weights = {"weights": self.weights} if self.weights else {}
        return self.feature_map(x, projection, is_query=is_query, **weights)


class _Kernel:
    def __init__(self, feature_map, projection, weights=None):
        self.bound = BoundMap(feature_map, weights)
        self.projection = projection
        self.log_space = feature_map.log_space
        self.floor = LOG_FLOOR if self.log_space else PLAIN_FLOOR

    def query_features(self, query):
        return self.bound(query, self.projection, is_query=True)

    def key_features(self, key):
        return self.bound(key, self.projection, is_query=False)

    def features_vjp(self, x, is_query):
        """Features, and the pullback to `x` and to each of the weights."""

        def features(x, *weights):
            weights = dict(zip(self.bound.weights, weights))
            bound = BoundMap(self.bound.feature_map, weights)
            return bound(x, self.projection, is_query=is_query)

        return vjp(features, (x, *self.bound.weights.values()))

    def added(self, features, mask, shift):
        """Keys' features as they are added to the sums.

        Args:
            features: (Log) features of the keys, `[B, H, C, M]`.
            mask: `[B, C]`, 0 where a key is not to be added.
            shift: Shift of the sums so far, `[B, H, 1, M]`.

        Returns:
            Features in units of `exp(shift)`, with the shift after them, the
            factor that brings the sums there, and that shift.
        """
        if not self.log_space:
            return _masked(mask, features, 0.0), None, shift
        log_k = _masked(mask, features, LOG_ZERO)
        new_shift = ops.maximum(shift, largest(log_k, axis=2))
        new_shift = ops.stop_gradient(new_shift)
        # Selected again: with no key so far the difference is 0.
        far_key = _masked(mask, ops.exp(log_k - new_shift), 0.0)
        return far_key, ops.exp(shift - new_shift), new_shift


class _Terms(NamedTuple):
    """Factors of a chunk's own part ("near") and of the sums' part ("far").

    Near: weights `unit * near_weight * (near_query @ near_key^T)`. Far: the
    read-out is `far_query @ sums^T`; then `sums * decay + values^T @ far_key`
    are the sums after the chunk, in units of `exp(-shift)`.
    """

    near_query: Any  # [B, H, C, M]
    near_key: Any  # [B, H, C, M]
    near_weight: Any  # [B, H, C, C]
    far_query: Any  # [B, H, C, M]
    far_key: Any  # [B, H, C, M]
    decay: Any  # [B, H, 1, M]
    shift: Any  # [B, H, 1, M]
    scale: Any  # [B, H, C, 1]


class FeatureChunks(_Kernel):
    """Every key is seen through its features; `x = (query, key, values)`, of
    `[B, H, C, D]` twice and `[B, H, C, F]`."""

    forward_slots = (0,)
    backward_slots = (1, 2)
    lags = {}

    def __init__(self, feature_map, projection, weights=None):
        super().__init__(feature_map, projection, weights)
        # Multiplied last, when the product is of the size of a weight again.
        self.unit = math.exp(-MARGIN) if self.log_space else 1.0

    def _terms(self, query, key, mask, shift, scale=None):
        """Factors from features `[B, H, C, M]` (log features, if so)."""
        if self.log_space:
            return self._log_terms(query, key, mask, shift, scale)
        key = _masked(mask, key, 0.0)
        earlier = ops.cast(_lower_triangle(ops.shape(query)[2]), query.dtype)
        return _Terms(
            near_query=query,
            near_key=key,
            near_weight=earlier[None, None],
            far_query=query,
            far_key=key,
            decay=ops.ones_like(shift),
            shift=shift,
            scale=query[..., :1] * 0.0,
        )

    def _log_terms(self, log_q, log_k, mask, shift, scale):
        """Factors whose products have twice the range of one exponential.

        Features of a token spread over hundreds of natural logarithms where
        inputs are large, and the largest of a query and of a key are seldom
        the same one: their products may be exp(-100) of what the two largest
        would give. So the scale of a row follows the products themselves.
        Rows whose largest is above exp(LEAST_LOG_PRODUCT - 2 HEADROOM),
        exp(-101), have exact outputs and gradients; down to exp(-161), exact
        outputs.
        """
        log_k = _masked(mask, log_k, LOG_ZERO)
        earlier = _lower_triangle(ops.shape(log_q)[2])
        max_q = largest(log_q, axis=-1)  # [B, H, C, 1]
        max_k = largest(log_k, axis=-1)  # [B, H, C, 1]
        # All logarithms of a row are taken relative to its own largest, which
        # cancels: smaller numbers lose less to rounding.
        log_q = log_q - max_q
        near_query = ops.exp(log_q + HEADROOM)
        # Selected again: the difference of two logarithms of zero is 0.
        near_key = ops.exp(log_k - max_k + HEADROOM)
        near_key = _masked(mask, near_key, 0.0)
        log_weight = ops.where(
            earlier, ops.swapaxes(max_k, -1, -2) - 2 * HEADROOM, LOG_ZERO
        )  # [B, H, C, C]
        if scale is None:
            products = ops.maximum(
                _outer(near_query, near_key), math.exp(LEAST_LOG_PRODUCT)
            )
            scale = ops.maximum(
                largest(log_q + shift, axis=-1),
                largest(log_weight + ops.log(products), axis=-1),
            )
        near_weight = ops.exp(log_weight - scale + MARGIN)
        new_shift = ops.maximum(shift, largest(log_k, axis=2))
        return _Terms(
            near_query=near_query,
            near_key=near_key,
            # Selected again: without any valid key, the difference is 0.
            near_weight=ops.where(earlier, near_weight, 0.0),
            far_query=ops.exp(log_q + shift - scale),
            far_key=ops.exp(log_k - new_shift),
            decay=ops.exp(shift - new_shift),
            shift=new_shift,
            scale=scale,
        )

    def _chain(self, near, grad_near, far, grad_far):
        """Gradient of features that served as a near and a far factor.

        Log features went through `exp(features - stabiliser)` in both.
        """
        if self.log_space:
            return self.unit * (near * grad_near) + far * grad_far
        return grad_near + grad_far

    def _weights(self, t):
        """Weights `[B, H, C, C]` of the chunk's own keys."""
        products = _outer(t.near_query, t.near_key)
        return self.unit * (t.near_weight * products)

    def forward(self, carry, x):
        (sums, shift), (query, key, values) = carry, x
        t = self._terms(
            self.query_features(query),
            self.key_features(key),
            _mask_of(values),
            shift,
        )
        weights = self._weights(t)
        output, normalizer = normalize(
            _times(weights, values) + _outer(t.far_query, sums), self.floor
        )
        sums = sums * t.decay + _transposed_times(values, t.far_key)
        return (sums, t.shift), (output, normalizer, t.scale, shift)

    def forward_gradient(self, carry, x, grad, scale):
        """Gradient of the query."""
        (sums, shift), (query, key, values) = carry, x
        features, pullback = self.features_vjp(query, is_query=True)
        mask = _mask_of(values)
        t = self._terms(features, self.key_features(key), mask, shift, scale)
        grad_products = t.near_weight * _outer(grad, values)  # [B, H, C, C]
        grad_features = self._chain(
            t.near_query,
            _times(grad_products, t.near_key),
            t.far_query,
            _times(grad, sums),
        )
        sums = sums * t.decay + _transposed_times(values, t.far_key)
        return (sums, t.shift), pullback(grad_features)

    def backward_gradient(self, grad_sums, x, grad, scale, shift):
        """Gradients of the key and of the values."""
        query, key, values = x
        mask = _mask_of(values)
        features, pullback = self.features_vjp(key, is_query=False)
        t = self._terms(
            self.query_features(query), features, mask, shift, scale
        )
        weights = self._weights(t)
        grad_products = t.near_weight * _outer(grad, values)  # [B, H, C, C]
        grad_features = self._chain(
            t.near_key,
            _transposed_times(grad_products, t.near_query),
            t.far_key,
            _times(values, grad_sums),
        )
        # What a masked key's features would have changed does not exist.
        grad_features = _masked(mask, grad_features, 0.0)
        grad_values = _gathered(weights, grad)
        grad_values += _outer(t.far_key, grad_sums)
        grad_sums = grad_sums * t.decay
        grad_sums += _transposed_times(grad, t.far_query)
        grad_key, *grad_weights = pullback(grad_features)
        return grad_sums, (grad_key, grad_values, *grad_weights)


class LocalBlocks(_Kernel):
    """The own and the previous block are seen exactly, earlier ones through
    their log features, under one normaliser.

    `x = (query, key, values, previous key, previous values)`. A step ends by
    adding the previous block to the sums: all its keys, or those that a mask
    `[B, C]` selects that comes last.
    """

    forward_slots = (0, 1, 2, 3, 4)
    backward_slots = (3, 4)
    # The previous block of these is the last step's.
    lags = {3: 1, 4: 2}

    def _near(self, query, x):
        """Keys `[B, H, 2 W, D]` of two blocks, which of them each row sees,
        and their exact scores `[B, H, W, 2 W]`."""
        key = ops.concatenate([x[3], x[1]], axis=2)
        mask = ops.concatenate([_mask_of(x[4]), _mask_of(x[2])], axis=1)
        causal = _lower_triangle(ops.shape(query)[2])
        seen = ops.concatenate([ops.ones_like(causal), causal], axis=1)
        seen = ops.logical_and(seen, mask[:, None, None, :] > 0)
        scores = ops.where(seen, _outer(query, key), LOG_ZERO)
        return key, seen, scores

    def _added(self, features, x, shift):
        """As `added`, for the previous block."""
        mask = x[5] if len(x) > 5 else _mask_of(x[4])
        return self.added(features, mask, shift)

    def _advance(self, carry, x):
        """The carry, with the previous block added."""
        sums, shift = carry
        far_key, decay, new_shift = self._added(
            self.key_features(x[3]), x, shift
        )
        sums = sums * decay + _transposed_times(x[4], far_key)
        return sums, new_shift

    def forward(self, carry, x):
        (sums, shift), query = carry, x[0]
        _, seen, scores = self._near(query, x)
        log_q = self.query_features(query) + shift
        scale = ops.maximum(
            largest(scores, axis=-1),
            largest(log_q, axis=-1),
        )
        weights = ops.where(seen, ops.exp(scores - scale), 0.0)
        values = ops.concatenate([x[4], x[2]], axis=2)  # [B, H, 2 W, F]
        output, normalizer = normalize(
            _times(weights, values) + _outer(ops.exp(log_q - scale), sums),
            self.floor,
        )
        return self._advance(carry, x), (output, normalizer, scale, shift)

    def read_one(self, carry, query, keys, values):
        """Output `[B, 1, H, E]` of one token that sees two blocks exactly.

        Args:
            carry: `(sums, shift)` of all earlier blocks.
            query: `[B, 1, H, D]`.
            keys: `[B, 2 W, H, D]`.
            values: `[B, 2 W, H, F]`; a key whose column of ones is 0 is none.
        """
        sums, shift = carry
        seen = values[:, None, None, :, 0, -1] > 0  # [B, 1, 1, 2 W]
        scores = ops.einsum("bihd,bjhd->bhij", query, keys)
        scores = ops.where(seen, scores, LOG_ZERO)
        log_q = self.query_features(ops.swapaxes(query, 1, 2)) + shift
        scale = ops.stop_gradient(
            ops.maximum(largest(scores, axis=-1), largest(log_q, axis=-1))
        )
        weights = ops.where(seen, ops.exp(scores - scale), 0.0)
        near = ops.einsum("bhij,bjhf->bhif", weights, values)
        far = _outer(ops.exp(log_q - scale), sums)
        return ops.swapaxes(normalize(near + far, self.floor)[0], 1, 2)

    def advance_one(self, carry, keys, values, complete):
        """The carry with the first of two blocks `[B, 2 W, H, ...]` added, in
        rows where `complete` `[B, 1]` is not 0."""
        size = ops.shape(keys)[1] // 2
        key, value = (ops.swapaxes(x[:, :size], 1, 2) for x in (keys, values))
        mask = _mask_of(value) * complete
        return self._advance(carry, (None, None, None, key, value, mask))

    def forward_gradient(self, carry, x, grad, scale):
        """Gradient of the query; those of keys and values seen exactly."""
        (sums, shift), query = carry, x[0]
        key, seen, scores = self._near(query, x)
        values = ops.concatenate([x[4], x[2]], axis=2)  # [B, H, 2 W, F]
        weights = ops.where(seen, ops.exp(scores - scale), 0.0)
        grad_scores = weights * _outer(grad, values)  # [B, H, W, 2 W]
        features, pullback = self.features_vjp(query, is_query=True)
        far_query = ops.exp(features + shift - scale)
        grad_query, *grad_weights = pullback(far_query * _times(grad, sums))
        grad_query += _times(grad_scores, key)
        grad_key = _gathered(grad_scores, query)
        grad_values = _gathered(weights, grad)
        size = ops.shape(query)[2]
        gradients = (
            grad_query,
            grad_key[:, :, size:],
            grad_values[:, :, size:],
            grad_key[:, :, :size],
            grad_values[:, :, :size],
            *grad_weights,
        )
        return self._advance(carry, x), gradients

    def backward_gradient(self, grad_sums, x, grad, scale, shift):
        """Gradients of the previous block's keys and values, as added."""
        features, pullback = self.features_vjp(x[3], is_query=False)
        far_key, decay, _ = self._added(features, x, shift)
        grad_features = far_key * _times(x[4], grad_sums)
        grad_values = _outer(far_key, grad_sums)
        log_q = self.query_features(x[0]) + shift
        grad_sums = grad_sums * decay
        grad_sums += _transposed_times(grad, ops.exp(log_q - scale))
        grad_key, *grad_weights = pullback(grad_features)
        return grad_sums, (grad_key, grad_values, *grad_weights)


class SummedChunks(_Kernel):
    """Every query sees every key through features: first all keys are added
    up, then each query reads the sums."""

    def add(self, carry, x):
        """The carry, with the chunk `x = (key, values)` added."""
        (sums, shift), (key, values) = carry, x
        far_key, decay, shift = self.added(
            self.key_features(key), _mask_of(values), shift
        )
        if decay is not None:
            sums = sums * decay
        return (sums + _transposed_times(values, far_key), shift), ()

    def add_gradient(self, x, shift, grad_sums):
        """Gradients of a chunk's keys and values, and of the weights."""
        key, values = x
        features, pullback = self.features_vjp(key, is_query=False)
        far_key, _, _ = self.added(features, _mask_of(values), shift)
        grad_features = _times(values, grad_sums)
        if self.log_space:
            grad_features = far_key * grad_features
        else:
            grad_features = _masked(_mask_of(values), grad_features, 0.0)
        grad_key, *grad_weights = pullback(grad_features)
        return (grad_key, _outer(far_key, grad_sums)), grad_weights

    def read(self, query, sums, shift):
        """Output of a chunk of queries, normaliser, and scale of its rows."""
        features = self.query_features(query)
        scale = features[..., :1] * 0.0
        if self.log_space:
            features = features + shift
            scale = largest(features, axis=-1)
            features = ops.exp(features - scale)
        output, normalizer = normalize(_outer(features, sums), self.floor)
        return output, normalizer, scale

    def read_gradient(self, query, grad, scale, sums, shift):
        """Gradients of a chunk's queries and the weights, and of the sums."""
        features, pullback = self.features_vjp(query, is_query=True)
        grad_features = _times(grad, sums)
        if self.log_space:
            features = ops.exp(features + shift - scale)
            grad_features = features * grad_features
        grad_query, *grad_weights = pullback(grad_features)
        return grad_query, grad_weights, _transposed_times(grad, features)
