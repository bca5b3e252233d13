"""Dense attention in float64 NumPy, from the weights of a layer.

Everything here forms the L x S matrix that the layers must never form, and
follows the formulas alone, so that an error of the layers cannot hide in it:

    x = q d^(-1/4),  y = k d^(-1/4)
    softmax kernel    exp(x . y)
    its estimate      1/M sum_m exp(w_m . x - |x|^2/2 + w_m . y - |y|^2/2)
    generalised       1/M sum_m (f(w_m . x) + eps) (f(w_m . y) + eps)

Shape letters: B batch, L and S query and key length, H heads, D key_dim,
E value_dim, M features, F input width.
"""

import dataclasses

import numpy as np

from keras_performer.layers import PerformerAttention
from keras_performer.layers import PerformerBlock
from tests.testing import to_numpy

RELU_EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to configure attention, and what the oracle must know of it.

    Attributes:
        kernel: "favor+", "relu" or "exact".
        causal: Whether a position sees no later one.
        window: Width of the blocks that are attended exactly; 0: none.
        kwargs: Further constructor arguments.
    """

    kernel: str
    causal: bool = False
    window: int = 0
    kwargs: tuple = ()

    @property
    def arguments(self):
        return {
            "feature_map": self.kernel,
            "causal": self.causal,
            **dict(self.kwargs),
        }

    def attention(self, num_heads=2, key_dim=5, num_features=26, **kwargs):
        """A PerformerAttention with biases that are not zero."""
        return PerformerAttention(
            num_heads,
            key_dim,
            num_features=num_features,
            **{
                "bias_initializer": "random_normal",
                **self.arguments,
                **kwargs,
            },
        )

    def block(self, num_heads=2, key_dim=5, num_features=26, **kwargs):
        """A PerformerBlock with a small feed-forward part."""
        return PerformerBlock(
            num_heads,
            13,
            key_dim=key_dim,
            num_features=num_features,
            **{**self.arguments, **kwargs},
        )

    def weights(self, layer, query, key, key_mask=None):
        """Attention weights `[B, H, L, S]` of this variant of a layer."""
        q = project(layer.query, query)
        k = project(layer.key, key)
        logits = self.logits(layer, q, k)
        return normalise(logits, key_mask, self.causal)

    def logits(self, layer, q, k):
        """Logarithms `[B, H, L, S]` of the kernel or of its estimate."""
        scale = q.shape[-1] ** -0.25
        x, y = q * scale, k * scale
        exact = np.einsum("blhd,bshd->bhls", x, y)
        if self.kernel == "exact":
            return exact
        if self.kernel == "relu":
            return relu_logits(to_numpy(layer.projection), x, y)
        estimate = softmax_estimate(layer, x, y)
        if not self.window:
            return estimate
        i = np.arange(q.shape[1])[:, None]
        j = np.arange(k.shape[1])[None, :]
        near = j // self.window >= i // self.window - 1
        return np.where(near, exact, estimate)

    def output(self, layer, query, value=None, key=None, key_mask=None):
        """What the whole attention layer must give, `[B, L, O]`."""
        value = query if value is None else value
        key = value if key is None else key
        weights = self.weights(layer, query, key, key_mask)
        v = project(layer.value, value)
        mixed = np.einsum("bhls,bshe->blhe", weights, v)
        dense = layer.attention_output
        kernel = to_numpy(dense.kernel).astype("float64")
        output = np.einsum("blhe,heo->blo", mixed, kernel)
        return output + (to_numpy(dense.bias) if layer.use_bias else 0.0)

    def block_output(self, block, x, key_mask=None):
        """What a pre-norm block with a ReLU feed-forward part must give."""
        x = x.astype("float64")
        normed = layer_norm(block.attention_norm, x)
        x = x + self.output(block.attention, normed, key_mask=key_mask)
        hidden = layer_norm(block.feedforward_norm, x)
        hidden = np.maximum(dense(block.intermediate, hidden), 0.0)
        return x + dense(block.output_dense, hidden)


# A short chunk puts several chunk borders into a short sequence.
VARIANTS = {
    "favor": Variant("favor+"),
    "favor-causal": Variant(
        "favor+", True, kwargs=(("local_window", 0), ("chunk_size", 3))
    ),
    "favor-window": Variant("favor+", True, 2, (("local_window", 2),)),
    "relu": Variant("relu"),
    "relu-causal": Variant("relu", True, kwargs=(("chunk_size", 3),)),
    "exact": Variant("exact"),
    "exact-causal": Variant("exact", True),
}
CAUSAL = [name for name, variant in VARIANTS.items() if variant.causal]
NOT_CAUSAL = [name for name in VARIANTS if name not in CAUSAL]
LINEAR = [name for name in VARIANTS if VARIANTS[name].kernel != "exact"]
# For what does not depend on the numbers: one of each kind of map.
SAMPLE = ["favor-window", "relu", "exact-causal"]


def project(layer, x):
    """Heads of a query, key or value projection: [B, L, F] to [B, L, H, D]."""
    kernel = to_numpy(layer.kernel).astype("float64")
    heads = np.einsum("blf,fhd->blhd", x.astype("float64"), kernel)
    return heads if layer.bias is None else heads + to_numpy(layer.bias)


def dense(layer, x):
    return x @ to_numpy(layer.kernel).astype("float64") + to_numpy(layer.bias)


def layer_norm(layer, x):
    centred = x - x.mean(-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(-1, keepdims=True) + layer.epsilon)
    return centred / spread * to_numpy(layer.gamma) + to_numpy(layer.beta)


def log_features(projection, x):
    """w . x - |x|^2/2 for every row w, `[B, L, H, M]`."""
    norm = (x**2).sum(-1, keepdims=True) / 2
    return np.einsum("blhd,md->blhm", x, projection) - norm


def softmax_estimate(layer, x, y):
    """Log of the random-feature estimate of exp(x . y)."""
    w = to_numpy(layer.projection).astype("float64")
    if 2 * len(w) == layer.num_features:
        w = np.concatenate([w, -w])
    assert len(w) == layer.num_features
    l_q, l_k = log_features(w, x), log_features(w, y)
    terms = (
        l_q.transpose(0, 2, 1, 3)[:, :, :, None]
        + l_k.transpose(0, 2, 1, 3)[:, :, None]
    )  # [B, H, L, S, M]
    shift = terms.max(-1, keepdims=True, initial=-np.inf)
    total = np.exp(terms - shift).sum(-1)
    return np.log(total) + shift[..., 0] - np.log(len(w))


def relu_logits(projection, x, y):
    """Log of the ReLU kernel; its features are positive by their epsilon."""
    w = projection.astype("float64")
    f_q = np.maximum(np.einsum("blhd,md->blhm", x, w), 0.0) + RELU_EPSILON
    f_k = np.maximum(np.einsum("bshd,md->bshm", y, w), 0.0) + RELU_EPSILON
    return np.log(np.einsum("blhm,bshm->bhls", f_q, f_k) / len(w))


def normalise(logits, key_mask=None, causal=False):
    """Rows that sum to one over the keys they see; zeros if they see none."""
    valid = np.ones(logits.shape, bool)
    if key_mask is not None:
        valid &= np.asarray(key_mask, bool)[:, None, None, :]
    if causal:
        valid &= np.tri(*logits.shape[-2:], dtype=bool)
    logits = np.where(valid, logits, -np.inf)
    shift = logits.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(shift), shift, 0.0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total > 0.0, total, 1.0)
