"""Sizes of the inputs in these tests: distinct, and prime where they can."""

BATCH, HEADS, DIM, WIDTH, FEATURES = 2, 3, 8, 5, 31
