"""Pipelines that train Performers on real data, one folder a task."""
