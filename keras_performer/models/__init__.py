"""Models."""

from keras_performer.models.performer_lm import PerformerLM
from keras_performer.models.sampling import sample

__all__ = ["PerformerLM", "sample"]
