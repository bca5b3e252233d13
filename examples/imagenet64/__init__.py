"""A causal Performer over images (ImageNet64), one sub-pixel at a time."""
