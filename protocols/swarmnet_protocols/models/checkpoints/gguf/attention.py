"""Attention of gguf files: the order of rows, scales, windows, and latent keys and values.

llama.cpp's converter shows what a file contains. Its graphs (src/models) show what that means.
"""

from typing import TYPE_CHECKING, Any

from swarmnet_protocols.models.checkpoints.gguf.rows import (
    LEFT_OUT,
    ROTATES_PART,
    Header,
    Setting,
    Weight,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def _heads(count: str) -> Weight:
    """Return the rows of queries or keys in llama.cpp's order, for rotary embeddings that turn
    neighbours.

    In transformers, the first elements of all pairs of a head precede the second elements.
    """

    def made(config: Any, rows: "Array") -> "Array":
        heads = getattr(config, count)
        return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return Weight(made=made)


NEIGHBOURS = {
    r"self_attn\.q_proj": _heads("num_attention_heads"),
    r"self_attn\.k_proj": _heads("num_key_value_heads"),
}


def gemma_query_scale(blocks_of_27b: int) -> Setting:
    """Return the setting of the scale of Gemma's attention, which no key of the file has. llama.cpp
    knows the models of 27 billion by their blocks (llama-model.cpp, ``LLM_TYPE_27B``)."""

    def scale(header: Header) -> int:
        is_largest = len(header.blocks) == blocks_of_27b
        own = header.own
        return int(own["embedding_length"] // own["attention.head_count"] if is_largest else header.head_size)

    return scale


def sliding_except(period: int) -> Setting:
    """Return the setting with the kind of attention of each block, by
    ``attention.sliding_window_pattern``.

    In a file without this key, every ``period``-th block has full attention.
    """

    def kinds(header: Header) -> list[str]:
        default = [(block + 1) % period != 0 for block in header.blocks]
        found = header.own.get("attention.sliding_window_pattern", default)
        return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in found]

    return kinds


def if_windows(setting: Setting) -> Setting:
    """Return the setting for files with sliding windows. In other files it is left out."""
    return lambda header: setting(header) if "attention.sliding_window" in header.own else LEFT_OUT


def rope_by_kind(sliding_base: float | None) -> Setting:
    """Return the setting with the rotary parameters of each kind of attention.

    ``sliding_base`` is the base for sliding windows in files that have no key for it. None: the
    base of full attention.
    """

    def parameters(header: Header) -> dict[str, Any]:
        base = header.own.get("rope.freq_base", 10_000.0)
        default = base if sliding_base is None else sliding_base
        sliding = header.own.get("rope.freq_base_swa", default)
        return {
            "full_attention": {"rope_type": "default", "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        }

    return parameters


def key_heads(kind: str) -> Setting:
    """Return the setting with the number of key heads in blocks with this kind of attention."""

    def heads(header: Header) -> int:
        counts, block = header.own["attention.head_count_kv"], sliding_except(6)(header).index(kind)
        return int(counts[block] if isinstance(counts, tuple) else counts)

    return heads


def has_full_values(header: Header) -> bool:
    """Return whether blocks with full attention have values of their own, instead of reusing their
    keys."""
    block = sliding_except(6)(header).index("full_attention")
    return f"blk.{block}.attn_v.weight" in header.shapes


QWEN35_ROPE = {
    **ROTATES_PART,
    "mrope_section": lambda header: [*header.own["rope.dimension_sections"][:3]],
    "mrope_interleaved": True,
}


# Latent attention of DeepSeek.


def head_sizes(header: Header) -> tuple[int, int]:
    """Return the sizes of a query head and of a value head.

    Newer converters describe the one head of compressed keys under the usual keys, and these sizes
    under others.
    """
    end = "_mla" if "attention.key_length_mla" in header.own else ""
    return header.own[f"attention.key_length{end}"], header.own[f"attention.value_length{end}"]


def mscale(header: Header) -> Any:
    """Return ``mscale_all_dim``. The key of the file holds a tenth of it. llama.cpp uses the same
    value as ``mscale`` (llama-context.cpp)."""
    found = header.own.get("rope.scaling.yarn_log_multiplier")
    return LEFT_OUT if found is None else round(10 * found, 6)


def keys_and_values(config: Any, keys: "Array", values: "Array") -> "Array":
    """Return the rows of keys and of values of each head: [H, rank, keys] and [H, values, rank]
    joined."""
    import numpy as np

    return np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, config.kv_lora_rank)
