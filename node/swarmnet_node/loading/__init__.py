"""Reads a model, fits it into memory, and says what the node hosts of it."""
