"""Continuous batching of several sequences over one chain."""
