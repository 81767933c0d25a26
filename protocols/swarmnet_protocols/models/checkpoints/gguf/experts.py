"""Experts of gguf files: which blocks have them, and how a token chooses them.

llama.cpp's converter (conversion/deepseek.py, glm.py) shows which keys a file has, and its graphs
(src/models) show what they mean.
"""

from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.rows import HINT, Header, Setting, Weight, key

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def dense_blocks(header: Header) -> list[int]:
    """Return the blocks without experts."""
    return [block for block in header.blocks if f"blk.{block}.ffn_gate_inp.weight" not in header.shapes]


def joined(_: Any, *parts: "Array") -> "Array":
    """Return the rows of several tensors, one tensor after another."""
    import numpy as np

    return np.concatenate(parts)


_GROUPS = {(61, 256): (8, 4), (60, 160): (8, 3), (27, 64): (1, 1)}
"""(blocks, routed experts) → (groups of experts, groups that a token uses). Older converters wrote
no keys for groups. The models are DeepSeek V3 and R1, V2 (arXiv 2405.04434, section 2.2), and
V2-Lite."""


def _group_setting(which: int, name: str) -> Setting:
    def value(header: Header) -> int:
        own = header.own
        if name in own:
            return int(own[name])
        found = _GROUPS.get((len(header.blocks), own.get("expert_count", 0)))
        if found is None:
            raise ConfigError(
                f"the file has no key {header.architecture}.{name}",
                hint=f"{HINT}, or a file that a newer llama.cpp converted",
            )
        return found[which]

    return value


group_count = _group_setting(0, "expert_group_count")
groups_used = _group_setting(1, "expert_group_used_count")


def is_deepseek_v3(header: Header) -> bool:
    """Return whether experts are chosen as in DeepSeek V3: by sigmoids with a bias.

    Files of GLM-4.7-Flash do not say so. llama.cpp recognises them by their number of blocks and
    their vocabulary (src/models/deepseek2.cpp).
    """
    is_flash = len(header.blocks) in (47, 48) and header.shapes["token_embd.weight"][0] == 154_880
    return bool(header.own.get("expert_gating_func", 2 if is_flash else 1) == 2)


QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": dense_blocks}
ROUTING_BIAS = {r"mlp\.(gate\.)?e_score_correction_bias": Weight(("exp_probs_b.bias",))}
ROUTED_SETTINGS = {
    "num_nextn_predict_layers": key("nextn_predict_layers", 0),
    "first_k_dense_replace": key("leading_dense_block_count", 0),
    "n_shared_experts": key("expert_shared_count", 0),
    "routed_scaling_factor": key("expert_weights_scale", 1.0),
}
