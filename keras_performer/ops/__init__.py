"""Pure functions on tensors: no layer, no variable, no global state."""

from keras_performer.ops import reference
from keras_performer.ops.features import generalized_features
from keras_performer.ops.features import optimal_a
from keras_performer.ops.features import optimal_positive_log_features
from keras_performer.ops.features import positive_log_features
from keras_performer.ops.features import softmax_log_features
from keras_performer.ops.features import trigonometric_features
from keras_performer.ops.linear_attention import attention_scores
from keras_performer.ops.linear_attention import causal_kernel_attention
from keras_performer.ops.linear_attention import causal_linear_attention
from keras_performer.ops.linear_attention import exact_attention
from keras_performer.ops.linear_attention import initial_state
from keras_performer.ops.linear_attention import kernel_attention
from keras_performer.ops.linear_attention import linear_attention
from keras_performer.ops.projections import iid_gaussian
from keras_performer.ops.projections import orthogonal_gaussian
from keras_performer.ops.projections import simplex_gaussian

__all__ = [
    "attention_scores",
    "causal_kernel_attention",
    "causal_linear_attention",
    "exact_attention",
    "generalized_features",
    "iid_gaussian",
    "initial_state",
    "kernel_attention",
    "linear_attention",
    "optimal_a",
    "optimal_positive_log_features",
    "orthogonal_gaussian",
    "positive_log_features",
    "reference",
    "simplex_gaussian",
    "softmax_log_features",
    "trigonometric_features",
]
