"""A tiny model that writes letters: its random answers are JSON only if a grammar makes them."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarmnet_protocols.models import resolve
from tests.support.swarm.swarm_lab import Reference

SPECIAL = (
    "<|stop|>",
    "<|start|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
MERGES = [
    ("{", '"'),
    ('"', ":"),
    ('":', "Ġ"),
    (",", "Ġ"),
    (",Ġ", '"'),
    ("a", "r"),
    ("n", "a"),
    ("na", "m"),
    ("nam", "e"),
]


def load_letters(directory: Path) -> Reference:
    """Save and load a random Llama whose tokens are bytes, some pairs and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in MERGES]
    vocabulary = {text: number for number, text in enumerate([*letters, *merged])}
    words = Tokenizer(BPE(vocabulary, MERGES))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_tokens([AddedToken(text, special=text.startswith(("<|", "["))) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|stop|>", pad_token="<|stop|>")
    size = len(vocabulary) + len(SPECIAL)
    config = LlamaConfig(
        vocab_size=size + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        initializer_range=0.4,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).eval().save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return Reference(resolve(str(directory / "model"), cache_dir=directory / "cache"))
