"""Recognises files that are not text models, and says what each is and what to do.

People download the wrong file, or half of one. ``failed_download`` and ``misfit_of`` recognise
files by their first bytes. ``check_kind`` recognises gguf files that are not language models.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, IntegrityError, SwarmnetError

HEAD_BYTES = 64
"""Leading bytes of a file that ``misfit_of`` needs to recognise it."""
_AGAIN = "download it again"
_OTHER = "choose another file of the model, such as Q4_K_M or Q8_0"
_LAYOUT = "use the model's Hugging Face layout"
_OWN_FILE = "give the model's own file: the hub has it in the same repository"
_DAMAGED: tuple[tuple[str, str, str], ...] = (
    (r"$", "is empty", _AGAIN),
    (r"GGUF.{0,3}$", "is incomplete", _AGAIN),
    (
        r"\s*<",
        "is a web page, not a model",
        "download the file itself; a gated model needs `hf auth login`",
    ),
    (
        r"version https://git-lfs",
        "is a pointer of Git LFS, not the file that it points to",
        "fetch the file with `git lfs pull`, or download it again",
    ),
    (r"\s*\{", "is a text, not a model: perhaps the answer of a server that refused", _AGAIN),
    (r"\0{8}", "begins with zeros: its download has not finished", _AGAIN),
)
"""Files that a failed download leaves: (pattern of the first bytes, what the file is, what to
do)."""
_OTHERS: tuple[tuple[str, str, str], ...] = (
    (
        r"GGUF\x00\x00\x00[\x01-\xff]",
        "is a big-endian gguf file",
        "download the little-endian one, or convert it: gguf-py's gguf_convert_endian.py",
    ),
    (
        r"GGUF",
        "is a gguf file of another version than 2 and 3",
        "download a newer one",
    ),
    (
        r"(lmgg|fmgg|tjgg|algg|ggml|ggjt)",
        "is in a format from before gguf",
        "download a gguf file of the model",
    ),
    (
        r"PK\x03\x04|\x80[\x02-\x05]",
        "is a PyTorch checkpoint or another archive, not a gguf file",
        _LAYOUT,
    ),
    (
        r".{8}\{",
        "is a safetensors file, not a gguf file",
        "give its folder, which has a config.json",
    ),
)
"""Files of another format, with the same columns as ``_DAMAGED``."""
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"}
_REMOVED |= {37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
"""Types of tensors that llama.cpp has removed."""
_TYPES = 1_000
"""llama.cpp numbers the types from 0, so a header with a type of at least this number is
damaged."""
_TYPE_WORDS = {
    "adapter": (
        "is a LoRA adapter, not a model",
        "give its base model's file; `swarmnet run --adapter` takes adapters in PEFT's layout",
    ),
    "mmproj": (
        "is the encoder of images or sound of a model (mmproj), not a language model",
        _OWN_FILE,
    ),
    "imatrix": (
        "is an importance matrix for quantising a model (imatrix), not a model",
        _OWN_FILE,
    ),
    "vocab": ("has a vocabulary and no weights", _OWN_FILE),
    "controlvector": ("is a control vector, not a model", _OWN_FILE),
}
"""``general.type`` → (what the file is, what to do). Files without that key are recognised by other
keys."""
_EMBEDDING = re.compile(r".*bert.*|.*-embed(ding)?|t5encoder")
"""Architectures of models whose outputs are embeddings."""
_OTHER_KINDS = {
    "wavtokenizer-dec": "makes sound, not text",
    "dream": "generates text by diffusion, not token by token",
    "llada": "generates text by diffusion, not token by token",
    "llada-moe": "generates text by diffusion, not token by token",
    "t5": "has an encoder and a decoder",
}


def failed_download(path: Path, head: bytes) -> SwarmnetError | None:
    """Return the error for a file that a failed download has left; None for any other file.

    ``head``: its first ``HEAD_BYTES``.
    """
    return _matching(path, head, _DAMAGED, IntegrityError)


def misfit_of(path: Path, head: bytes) -> SwarmnetError | None:
    """Return the error for a file that is not a gguf file of a supported version; None if it may be
    one.

    ``head``: its first ``HEAD_BYTES``.
    """
    if head[:4] == b"GGUF" and head[4:8] in (b"\2\0\0\0", b"\3\0\0\0"):
        return None
    unknown = IntegrityError(f"{path} is not a gguf file, or is damaged", hint=_AGAIN)
    return failed_download(path, head) or _matching(path, head, _OTHERS, ConfigError) or unknown


def _matching(
    path: Path, head: bytes, rows: Sequence[tuple[str, str, str]], kind: type[SwarmnetError]
) -> SwarmnetError | None:
    text = head.decode("latin-1")
    return next(
        (kind(f"{path} {what}", hint=hint) for start, what, hint in rows if re.match(start, text, re.DOTALL)),
        None,
    )


def unread_type(name: str, kind: int) -> ConfigError:
    """Return the error for a tensor of a type that is not read.

    Raises ``ValueError`` for a number that no type can have.
    """
    from gguf import GGMLQuantizationType

    if kind >= _TYPES:
        raise ValueError(f"tensor {name} has the type {kind}")
    known = {each.value: each.name for each in GGMLQuantizationType}
    if kind in _REMOVED:
        what = f"{_REMOVED[kind]}, which llama.cpp has removed"
    else:
        what = known.get(kind, f"a type that is not known here, number {kind}") + ", which is not read"
    return ConfigError(f"has the tensor {name[:200]!r} stored as {what}", hint=_OTHER)


def check_kind(
    architecture: str, fields: Mapping[str, object], tensors: Collection[str], types: Mapping[int, str]
) -> None:
    """Raise ``ConfigError`` unless the file is a model that generates text. The error says what the
    file is.

    ``types``: type of tensors in the file → name of one such tensor.
    """
    kind = str(fields.get("general.type", "model"))
    if kind == "model":
        kind = _kind_by_content(architecture, fields, tensors)
    if kind != "model":
        what, hint = _TYPE_WORDS.get(kind, (f"is no model: its general.type is {kind[:100]!r}", _OWN_FILE))
        raise ConfigError(what, hint=hint)
    if _EMBEDDING.fullmatch(architecture) or fields.get(f"{architecture}.pooling_type", 0) != 0:
        raise ConfigError(
            "is an embedding model, which generates no text", hint="choose a model for chats or completions"
        )
    if architecture in _OTHER_KINDS:
        raise ConfigError(
            f"is a model that {_OTHER_KINDS[architecture]}", hint="docs/families.md lists families that work"
        )
    if fields.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        raise ConfigError(
            "has no tokenizer", hint=f"choose another file of the model, or {_LAYOUT.removeprefix('use ')}"
        )
    for number, name in types.items():
        if not _is_read(number):
            raise unread_type(name, number)


def _kind_by_content(architecture: str, fields: Mapping[str, object], tensors: Collection[str]) -> str:
    if "adapter.type" in fields or any(name.endswith((".lora_a", ".lora_b")) for name in tensors):
        return "adapter"
    if architecture == "clip":
        return "mmproj"
    if any(name.endswith(".in_sum2") for name in tensors):
        return "imatrix"
    if not tensors:
        return "vocab"
    return architecture if architecture == "controlvector" else "model"


def _is_read(kind: int) -> bool:
    """Return whether gguf's Python code can dequantise a type, by trying it on one block of
    zeros."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    found = GGMLQuantizationType(kind)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[found][1]), np.uint8), found)
    except NotImplementedError:
        return False
    return True
