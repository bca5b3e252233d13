"""Pure functions on tensors: no layer, no variable, no global state."""

from keras_performer.ops import reference
from keras_performer.ops.features import generalized_features
from keras_performer.ops.features import positive_log_features
from keras_performer.ops.linear_attention import attention_scores
from keras_performer.ops.linear_attention import causal_kernel_attention
from keras_performer.ops.linear_attention import causal_linear_attention
from keras_performer.ops.linear_attention import exact_attention
from keras_performer.ops.linear_attention import kernel_attention
from keras_performer.ops.linear_attention import linear_attention
from keras_performer.ops.projections import orthogonal_gaussian

__all__ = [
    "attention_scores",
    "causal_kernel_attention",
    "causal_linear_attention",
    "exact_attention",
    "generalized_features",
    "kernel_attention",
    "linear_attention",
    "orthogonal_gaussian",
    "positive_log_features",
    "reference",
]
