"""Computes blocks: continuous batching, the KV cache, attention and the kernels."""
