"""Performer attention for Keras: linear in the length of the sequence."""

from keras_performer._backend import require_backend

require_backend()

from keras_performer import feature_maps  # noqa: E402
from keras_performer import layers  # noqa: E402
from keras_performer import ops  # noqa: E402
from keras_performer import models  # noqa: E402
from keras_performer import callbacks  # noqa: E402
from keras_performer import saving  # noqa: E402
from keras_performer.feature_maps import FavorPlus  # noqa: E402
from keras_performer.feature_maps import FavorPlusPlus  # noqa: E402
from keras_performer.feature_maps import FavorSharp  # noqa: E402
from keras_performer.feature_maps import FeatureMap  # noqa: E402
from keras_performer.feature_maps import GeneralizedKernel  # noqa: E402
from keras_performer.feature_maps import LearnedFeatures  # noqa: E402
from keras_performer.feature_maps import TrigonometricFeatures  # noqa: E402
from keras_performer.layers import PerformerAttention  # noqa: E402
from keras_performer.layers import PerformerBlock  # noqa: E402
from keras_performer.layers import TokenAndPositionEmbedding  # noqa: E402
from keras_performer.layers import calibrate  # noqa: E402
from keras_performer.models import PerformerLM  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "FavorPlus",
    "FavorPlusPlus",
    "FavorSharp",
    "FeatureMap",
    "GeneralizedKernel",
    "LearnedFeatures",
    "PerformerAttention",
    "PerformerBlock",
    "PerformerLM",
    "TokenAndPositionEmbedding",
    "TrigonometricFeatures",
    "calibrate",
    "callbacks",
    "feature_maps",
    "layers",
    "models",
    "ops",
    "saving",
]
