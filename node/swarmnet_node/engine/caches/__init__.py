"""Caches of a stage: for each sequence, between two steps, its keys and values, or its recurrent state."""
