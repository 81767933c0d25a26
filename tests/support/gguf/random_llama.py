"""A gguf file with the structure of Llama 3.2 1B, a small vocabulary and random weights, for
benches of speed."""

import string
from itertools import chain, islice, product
from pathlib import Path

import gguf
import numpy as np

from swarmnet_protocols.quantization.formats import Format
from tests.support.gguf.packed_matrices import weight_matrix

BLOCKS, WIDTH, INNER, HEADS, KEY_HEADS = 16, 2048, 8192, 32, 8
TOKENS = 32_768
"""A quarter of the original's vocabulary, whose embeddings would be a fifth of the file."""
_KEYS = WIDTH // HEADS * KEY_HEADS
_MATRICES = {
    "attn_q": (WIDTH, WIDTH), "attn_k": (_KEYS, WIDTH), "attn_v": (_KEYS, WIDTH), "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
}  # fmt: skip


def write_random_llama(path: Path, format: Format) -> Path:
    """Write the model with all matrices in ``format``.

    Blocks have the same random rows in different orders, because drawing new ones takes longer than
    reading the file.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    words = chain.from_iterable(product(string.ascii_letters, repeat=length) for length in (1, 2, 3))
    writer.add_token_list(["".join(word) for word in islice(words, TOKENS)])
    writer.add_token_types([1] * TOKENS)
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, values: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> None:
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType(format))

    drawn = {
        name: weight_matrix(format, *shape, seed).segments[0].data
        for seed, (name, shape) in enumerate(_MATRICES.items())
    }
    ones = np.ones(WIDTH, np.float32)
    add("token_embd", weight_matrix(format, TOKENS, WIDTH, len(drawn)).segments[0].data)
    writer.add_tensor("output_norm.weight", ones)
    for block in range(BLOCKS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", ones)
        for name, rows in drawn.items():
            add(f"blk.{block}.{name}", np.roll(rows, 17 * block, 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
