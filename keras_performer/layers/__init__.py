"""Layers."""

from keras_performer.layers.embeddings import TokenAndPositionEmbedding
from keras_performer.layers.feature_state import calibrate
from keras_performer.layers.performer_attention import PerformerAttention
from keras_performer.layers.performer_block import PerformerBlock

__all__ = [
    "PerformerAttention",
    "PerformerBlock",
    "TokenAndPositionEmbedding",
    "calibrate",
]
