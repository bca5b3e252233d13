"""A causal Performer language model on books (PG-19) or any other text."""
