"""Packed weights: matrices in the quantised formats of gguf files, and products with them."""
