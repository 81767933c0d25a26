"""Continuous batching: many answers at once over a few chains."""
