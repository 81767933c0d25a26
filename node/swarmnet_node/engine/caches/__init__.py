"""Caches of a stage: what each sequence keeps between two steps, keys and values or recurrent
states."""
