"""A tiny seeded Llama: the reference of simulations and fast tests, as a checkpoint on disk."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
BLOCKS = 6


def save_tiny_llama(directory: Path, *, blocks: int = BLOCKS) -> Path:
    """A random Llama with a byte-sized vocabulary, the same for everybody, in HF layout."""
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
        # Large enough that greedy tokens differ from each other and from one another's rounding.
        initializer_range=0.4,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    return directory
