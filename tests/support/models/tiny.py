"""A tiny seeded Llama: the reference of simulations and fast tests, as a checkpoint on disk."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
BLOCKS = 6
LIVELY = 0.4
"""A spread of the weights so large that greedy tokens differ, and that rounding does not decide
them."""
CALM = 0.1
"""A spread that hardly magnifies rounding: float32 gradients are within 3e-6 of those in float64.
With ``LIVELY`` they are up to 3e-5 away, on every kind of processor."""


def save_tiny_llama(directory: Path, *, blocks: int = BLOCKS, spread: float = LIVELY) -> Path:
    """Save the same random Llama with a byte-sized vocabulary each time, in HF layout; ``spread``
    is that of its weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=spread,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    return directory
