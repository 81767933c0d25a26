"""Routed experts: which peers hold them, which peers compute a row, and which experts move."""
