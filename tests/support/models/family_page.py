"""Writes docs/families.md: ``python -m tests.support.models.family_page``."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import llama_shape, resolve
from tests.support.gguf.families import FILES
from tests.support.models.hub_families import FAMILIES, LINEAR, REFUSED

MOST_USED = (
    *("qwen3", "qwen2", "llama", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen3_moe"),
    *("gemma3", "gemma3_text", "gemma4", "gpt_oss", "mistral", "mistral3", "deepseek_v3", "phi3"),
    *("glm4_moe", "gpt2", "opt", "deepseek_v32"),
)
"""The 20 text architectures that people use most, as far as could be found without the hub: by its
lists of downloads in mid-2026, reports about them, and memory. The order means nothing."""

EXACT = frozenset(
    (
        *("cohere", "cohere2", "gemma2", "gemma3", "gemma3_text", "gemma4", "granite", "llama"),
        *(
            "ministral3",
            "mistral",
            "mistral3",
            "olmo2",
            "olmo3",
            "phi3",
            "qwen2",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3",
        ),
        *("qwen3_vl", "smollm3", "starcoder2"),
        *("glm4_moe", "granitemoe", "granitemoeshared", "minimax_m2", "mixtral", "olmoe"),
        *("qwen2_moe", "qwen3_moe", "qwen3_vl_moe"),
    )
)
"""Families whose blocks C computes: with the same bits on every processor."""

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
_HEAD = """# Families of models

`python -m tests.support.models.family_page` writes this page, and
`tests/unit/protocols/models/test_families.py` tests every row.

Each family is tested with a small model of random weights in float32: as a directory in Hugging
Face layout, and as a gguf file. No hub was reached. A directory has a `config.json` with the fields
of a published one and smaller dimensions, and tensors by the names that transformers'
`save_pretrained` writes. A gguf file has the names, keys and orders that llama.cpp's converter
writes. Which quantised checkpoints are read is on [another
page](../protocols/swarmnet_protocols/models/README.md).

A family that is not listed works as a directory under two conditions. Its decoder consists of
embeddings, layers and a final norm. Its layers keep keys, values and recurrent states in
transformers' cache. Any other family is refused when its files are read, or when a host loads its
blocks. A gguf file of an architecture that is not listed is refused: use the directory.

If a key, a setting or a tensor changes answers and is not read, the file is refused by its name
([0101](decisions/0101-gguf-completely-or-refused.md),
[0110](decisions/0110-what-transformers-drops.md)). Tests change each setting of each listed
directory: the answer changes as in transformers, or the directory is refused, or the setting is
known to change nothing.

## Families that work

Every row was tested in each layout against `generate` of the class that the checkpoint names:

- Greedy tokens are equal through one, two and three hops, for sequences alone and for several in
  one batch that enter in chunks.
- Logits after 16, 150 and 1,000 positions differ by less than 1.2e-4 of their norm. That is a
  quarter of the rounding of float16, so a step in half precision would show.
- A sequence that is rewound continues as if the rest had never been.
- Multimodal models run as text-only models: tensors of towers for images and sound are neither in
  the manifest nor read.

The column gguf has llama.cpp's name of the architecture. Where it is empty, use the directory. The
column arithmetic says `exact-1` where C computes the blocks, with packed weights on a CPU: then
outputs have the same bits on every processor, in any batch. torch computes the other families.
Hosts of families marked `without torch` import neither torch nor transformers
([0121](decisions/0121-hosts-without-torch.md)).

"""
_NOTES = {
    "mistral": "Files of Mistral 7B v0.1 do not tell its window: beyond 4096 positions, use the directory",
    "phi3": "Up to `original_max_position_embeddings` (4096) positions: [there its rotary embedding changes](decisions/0061-sequences-end-where-rotary-embeddings-change.md)",
    **dict.fromkeys(("gemma4", "gemma4 with experts"), "Those without embeddings of each layer"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "Keys and values are kept expanded"),
}


def _mark(name: str) -> str:
    return "yes" if name in MOST_USED else ""


def page(reasons: Mapping[str, str], files: Mapping[str, str]) -> str:
    """The text of docs/families.md.

    ``reasons`` has, for each of ``REFUSED``, why it is refused; ``files`` the architecture of gguf
    files.
    """
    lines = [
        "| `model_type` | models | safetensors | gguf | arithmetic | among the 20 most used | recurrent state | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, family in sorted(FAMILIES.items()):
        text = {**family.config, **family.config.get("text_config", {})}
        kept = {"mamba", "conv", LINEAR} & set(text.get("layer_types", ()))
        is_recurrent = bool(kept) or any(key.startswith("mamba") for key in text)
        found = files.get(name) or files.get(text["model_type"])
        gguf = f"`{found}`" if found else ""
        state = "yes" if is_recurrent else ""
        without_torch = ", without torch" if name in llama_shape.FAMILIES else ""
        arithmetic = f"exact-1{without_torch}" if name in EXACT else "torch"
        cells = (
            f"`{name}`",
            family.models,
            "yes",
            gguf,
            arithmetic,
            _mark(name),
            state,
            _NOTES.get(name, ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    works = sum(name in FAMILIES for name in MOST_USED)
    lines += ["", f"{works} of the {len(MOST_USED)} most used work.", "", "## Families that are refused", ""]
    lines += ["| family | models | among the 20 most used | refused with |", "|---|---|---|---|"]
    for name in sorted(REFUSED):
        lines.append(f"| {name} | {REFUSED[name].models} | {_mark(name)} | {reasons[name]} |")
    return _HEAD + "\n".join(lines) + "\n"


def reason_for(name: str, directory: Path) -> str:
    """The message with which a family of ``REFUSED`` is refused."""
    path = REFUSED[name].save(directory / "model")
    try:
        resolve(str(path), cache_dir=directory / "cache")
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{name} is not refused")


def reasons_in(folder: Path) -> dict[str, str]:
    """Why each of ``REFUSED`` is refused. ``folder`` is for its files."""
    return {name: reason_for(name, folder / name) for name in REFUSED}


def current(reasons: Mapping[str, str]) -> str:
    """The text of the page."""
    files = {name: file.architecture for name, file in FILES.items()}
    named = {file.family.config["model_type"]: file.architecture for file in FILES.values()}
    return page(reasons, named | files)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(current(reasons_in(Path(scratch))))
