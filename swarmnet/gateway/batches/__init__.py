"""Batches: a file of prompts becomes a file of answers, while nobody waits."""
