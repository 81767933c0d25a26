"""A gguf file in memory, to be changed and written again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType


@dataclass
class Key:
    """A value of the metadata; ``sub``: the type of an array's elements."""

    value: Any
    kind: GGUFValueType
    sub: GGUFValueType | None = None


@dataclass
class Tensor:
    """The bytes or numbers of a tensor, outermost dimension first."""

    data: Any
    kind: GGMLQuantizationType = GGMLQuantizationType.F32


@dataclass
class GgufFile:
    """The keys and tensors of a file, in their order."""

    architecture: str
    keys: dict[str, Key]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        reader = gguf.GGUFReader(path)
        keys = {}
        for name, field in reader.fields.items():
            if not name.startswith("GGUF."):
                sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                keys[name] = Key(field.contents(), field.types[0], sub)
        architecture = keys.pop("general.architecture").value
        tensors = {each.name: Tensor(np.array(each.data), each.tensor_type) for each in reader.tensors}
        return cls(architecture, keys, tensors)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for name, key in self.keys.items():
            writer.add_key_value(name, key.value, key.kind, sub_type=key.sub)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


WIDTH, HEADS, KEY_HEADS, BLOCKS, VOCABULARY = 64, 4, 2, 2, 64
_BASE: dict[str, Any] = {
    "context_length": 512, "embedding_length": WIDTH, "block_count": BLOCKS, "feed_forward_length": 96, "rope.freq_base": 12_345.0,
    "attention.head_count": HEADS, "attention.head_count_kv": KEY_HEADS, "attention.layer_norm_rms_epsilon": 1e-3,
}  # fmt: skip
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
_HEAD = {"attention.key_length": 24, "attention.value_length": 24}
_GEMMA = {**_HEAD, "attention.sliding_window": 8}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_FACTORS = {f"rope_factors_{name}.weight": (6,) for name in ("long", "short")}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"rope.dimension_count": 16, "vocab_size": VOCABULARY}, {"rope_freqs.weight": (8,)}),
    "llama-linear": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    "qwen2": ("qwen2", _YARN, {"attn_q.bias": (64,), "attn_k.bias": (32,), "attn_v.bias": (32,)}),
    "qwen3": ("qwen3", _HEAD, {"attn_q_norm.weight": (24,), "attn_k_norm.weight": (24,)}),
    "qwen3moe": ("qwen3moe", {**_HEAD, **_EXPERTS}, {"attn_q_norm.weight": (24,), "attn_k_norm.weight": (24,)}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)},
    ),
    "gemma3": (
        "gemma3",
        {**_GEMMA, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "block_count": 6},
        {
            **{f"attn_{part}_norm.weight": (24,) for part in "qk"},
            "post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,),
        },
    ),
    "phi3": (
        "phi3",
        {
            "rope.dimension_count": 12, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25,
            "attention.sliding_window": 8,
        },
        _FACTORS,
    ),
}  # fmt: skip
"""By a name: llama.cpp's name of the architecture, keys beside the usual ones, and the shapes of further tensors: of each block, or with their whole names."""
TEXT = "".join(chr(33 + index) for index in range(VOCABULARY - 6)) + '!!" 1<end><turn>'
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}!{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def family(name: str) -> GgufFile:
    """A small file of random numbers, with the keys and names that llama.cpp's converter writes."""
    architecture, keys, extra = FAMILIES[name]
    own = {f"{architecture}.{key}": _key(value) for key, value in (_BASE | keys).items()}
    rng = np.random.default_rng(1)

    def numbers(shape: tuple[int, ...], is_factor: bool = False) -> Tensor:
        if is_factor:
            return Tensor(np.sort(rng.uniform(1.0, 6.0, shape)).astype(np.float32))
        scale, middle = (0.2, 1.0) if len(shape) == 1 else (1.5 * shape[-1] ** -0.5, 0.0)
        return Tensor(rng.normal(middle, scale, shape).astype(np.float32))

    head = keys.get("attention.key_length", WIDTH // HEADS)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
        "attn_output": (WIDTH, HEADS * head),
    }
    if architecture == "phi3":
        shapes |= {
            "attn_qkv": ((HEADS + 2 * KEY_HEADS) * head, WIDTH),
            "ffn_up": (192, WIDTH),
            "ffn_down": (WIDTH, 96),
        }
    else:
        shapes |= {
            "attn_q": (HEADS * head, WIDTH),
            "attn_k": (KEY_HEADS * head, WIDTH),
            "attn_v": (KEY_HEADS * head, WIDTH),
        }
    if "expert_count" in keys:
        shapes |= {
            "ffn_gate_inp": (4, WIDTH),
            "ffn_gate_exps": (4, 32, WIDTH),
            "ffn_up_exps": (4, 32, WIDTH),
            "ffn_down_exps": (4, WIDTH, 32),
        }
    elif architecture != "phi3":
        shapes |= {"ffn_gate": (96, WIDTH), "ffn_up": (96, WIDTH), "ffn_down": (WIDTH, 96)}
    tensors = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    if not architecture.startswith("gemma"):
        tensors["output.weight"] = (VOCABULARY, WIDTH)
    for block in range(keys.get("block_count", BLOCKS)):
        tensors |= {f"blk.{block}.{each}.weight": shape for each, shape in shapes.items()}
        tensors |= {
            f"blk.{block}.{each}": shape for each, shape in extra.items() if not each.startswith("rope_")
        }
    tensors |= {each: shape for each, shape in extra.items() if each.startswith("rope_")}
    return GgufFile(
        architecture,
        own | _tokenizer(),
        {each: numbers(shape, each.startswith("rope_")) for each, shape in tensors.items()},
    )


def _tokenizer() -> dict[str, Key]:
    """A tokenizer whose ids for ``TEXT`` depend on each of its keys."""
    words = ["!!", '!"', "\u01201", "\u0120", "<end>", "<turn>"]
    tokens = [*(chr(33 + index) for index in range(VOCABULARY - len(words))), *words]
    found: dict[str, Any] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * (VOCABULARY - 2) + [3, 4],
        "merges": ["! !", '! "', "\u0120 1"], "bos_token_id": 3, "eos_token_id": VOCABULARY - 2, "eot_token_id": 5,
        "add_bos_token": True,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{name}": _key(value) for name, value in found.items()}
    return keys | {"tokenizer.chat_template": _key(_TEMPLATE), "general.name": _key("a model")}


def _key(value: Any) -> Key:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    if isinstance(value, list):
        kind = GGUFValueType.INT32 if isinstance(value[0], int) else kinds[type(value[0])]
        return Key(value, GGUFValueType.ARRAY, kind)
    return Key(value, kinds[type(value)])
