"""Recurrent states of gguf files: gated delta nets, Mamba, and short convolutions.

llama.cpp's converter (conversion/qwen.py, falcon_h1.py) shows what a file has. Its graphs
(src/models) show what that means.
"""

from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.rows import (
    HINT,
    LEFT_OUT,
    NORMS_PLUS_ONE,
    Header,
    Weight,
    key,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def conv_types(header: Header) -> list[str]:
    """Return the kinds of the blocks. Blocks without key heads are convolutions."""
    heads = header.own["attention.head_count_kv"]
    return ["full_attention" if count else "conv" for count in heads]


def log_of_decay(values: "Array") -> "Array":
    """Return the logarithms of decays. Files hold the negated decays."""
    import numpy as np

    if not (values < 0).all():
        raise ValueError("a decay of a recurrent state is not positive")
    found: Array = np.log(-values)
    return found


# Gated delta net. It has K key heads and V value heads. V / K value heads share each key head.


def _layer_types(header: Header) -> list[str]:
    """Return which blocks are recurrent. In a file without a list, all blocks but every n-th are
    recurrent (src/models/qwen35.cpp)."""
    interval = header.own.get("full_attention_interval", 4)
    recurrent = header.own.get("attention.recurrent_layers")
    if not isinstance(recurrent, tuple):
        recurrent = [bool((block + 1) % interval) for block in header.blocks]
    return ["linear_attention" if recurrent[block] else "full_attention" for block in header.blocks]


def value_head_size(header: Header) -> int:
    return int(header.own["ssm.inner_size"] // header.own["ssm.time_step_rank"])


def _by_key_head(config: Any, rows: "Array") -> "Array":
    """Reorder rows of value heads for transformers, grouped by key head.

    Files have the first value head of every key head, then the second of every key head.
    """
    heads = config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    return rows.reshape(each, heads, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _values_by_key_head(config: Any, rows: "Array") -> "Array":
    """Reorder only the rows of values as ``_by_key_head`` does. The rows of queries and keys
    precede them."""
    import numpy as np

    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([rows[:keys], _by_key_head(config, rows[keys:])])


def joined_by_key_head(config: Any, qkv: "Array", z: "Array") -> "Array":
    """Return the rows of each key head: its queries, keys, values and gates."""
    import numpy as np

    heads, keys = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts = [*np.split(qkv, [keys, 2 * keys]), z]
    rows = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(rows, 1).reshape(-1, *qkv.shape[1:])


DELTA_SETTINGS = {
    "full_attention_interval": key("full_attention_interval", LEFT_OUT),
    "layer_types": _layer_types,
    "linear_value_head_dim": value_head_size,
    "num_nextn_predict_layers": key("nextn_predict_layers", 0),
}
DELTA_WEIGHTS = {
    r"linear_attn\.A_log": Weight(("ssm_a",), lambda _, values: log_of_decay(values)),
    r"linear_attn\.dt_bias": Weight(("ssm_dt.bias",)),
    r"linear_attn\.norm": Weight(),
    **NORMS_PLUS_ONE,
}
TILED_WEIGHTS = {
    r"linear_attn\.A_log": Weight(
        ("ssm_a",), lambda config, values: _by_key_head(config, log_of_decay(values))
    ),
    r"linear_attn\.dt_bias": Weight(("ssm_dt.bias",), _by_key_head),
    r"linear_attn\.(conv1d|in_proj_qkv)": Weight(made=_values_by_key_head),
    r"linear_attn\.in_proj_[zab]": Weight(made=_by_key_head),
    r"linear_attn\.out_proj": Weight(made=lambda config, values: _by_key_head(config, values.T).T),
    r"linear_attn\.norm": Weight(),
    **NORMS_PLUS_ONE,
}


# Falcon-H1.


def untied(header: Header) -> bool:
    """Return False. The head is never tied, because a file holds embeddings and head after
    multiplying each by a multiplier of its own."""
    if "output.weight" not in header.shapes:
        raise ConfigError(
            "the file has no tensor 'output.weight', and no key for the scale of a tied head",
            hint=HINT,
        )
    return False
