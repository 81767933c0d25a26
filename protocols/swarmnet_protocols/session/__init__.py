"""The data that clients and hosts share for inference and training passes.

It covers steps, activation logs, links, adapters and passes.
"""

MAX_RANK = 256
"""Highest rank of a LoRA adapter that hosts apply."""
