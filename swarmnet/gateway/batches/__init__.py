"""Batches: many prompts whose answers nobody waits for, from a file into a file."""
