"""No key and no tensor of a gguf file can go, change or come without another answer or a
refusal."""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFValueType

from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.models import resolve
from tests.support.gguf.families import FILES
from tests.support.gguf.files import TEXT, GgufFile, Key, Tensor, tokenizer
from tests.support.gguf.writing import write

IDS = torch.randint(6, 58, (1, 40), generator=torch.Generator().manual_seed(1))
"""Longer than every sliding window."""
STRIDE = 61
"""One of so many changes is tried in a fast run."""
HARMLESS = {
    r".* general\.name.*": "names do not change how these architectures are read",
    r"without .*\.vocab_size": "the tokens tell it",
    r"without .*\.(value_length|value_length_swa|value_length_mla)": "the shapes of the tensors tell it",
    r"without .*\.expert_(shared_)?feed_forward_length": "the shapes of the experts tell it",
    r"(without|with another) (qwen\w*moe|qwen3next|gpt-oss|minimax-m2)\.feed_forward_length.*": "no block is dense",
    r"(without|with another) qwen\w+\.full_attention_interval.*": "recurrent_layers comes first, in llama.cpp, too",
    r"(without|with another) qwen\w+vl\w*\.(rope\.dimension_sections|n_deepstack_layers).*": "of images only",
    r"without deepseek2\.attention\.(head_count_kv|key_length)": "latent attention has sizes of its own",
    r"with another deepseek2\.rope\.scaling\.original_context_length.*": "heads so small have no frequency between the bounds",
    r"without minimax-m2\.expert_gating_func": "the architecture has one",
    r"without olmo2\.attention\.sliding_window_pattern": "each fourth block has no window, as llama.cpp has it",
    r"(without|with another) phi3\.(context_length|attention\.sliding_window).*": "sequences end before",
    r"without phi3\.rope\.scaling\.attn_factor": "it follows from the two lengths",
    r"with another rope_factors_long\.weight": "sequences end where these factors would apply",
    r"with another .*\.yarn_beta_(fast|slow).*": "heads so small have no frequency between the bounds",
}
"""Changes after which the answer is the same, and why it must be."""
DEFAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "attention.head_count_kv": lambda own: own["attention.head_count"],
    "attention.key_length": lambda own: own["embedding_length"] // own["attention.head_count"],
    "attention.shared_kv_layers": lambda _: 0,
    # of GLM, of others
    "expert_gating_func": lambda own: 2 if "nextn_predict_layers" in own else 1,
    "expert_group_count": lambda _: 1,
    "expert_group_used_count": lambda _: 1,
    "expert_weights_scale": lambda _: 1.0,
    "nextn_predict_layers": lambda _: 0,
    "rope.dimension_count": lambda own: head_size(own, ""),
    "rope.dimension_count_swa": lambda own: head_size(own, "_swa"),
    "rope.freq_base_swa": lambda _: 10_000.0,
    "rope.scaling.type": lambda _: "none",
    "rope.scaling.yarn_beta_fast": lambda _: 32.0,
    "rope.scaling.yarn_beta_slow": lambda _: 1.0,
}
"""The value that llama.cpp takes for a key that is missing, by the other keys."""


def head_size(own: dict[str, Any], kind: str) -> Any:
    size = own["embedding_length"] // own["attention.head_count"]
    return own.get(f"attention.key_length{kind}", size)


FAST = ("llama", "gemma3_text", "phi3", "gpt_oss", "deepseek_v3", "qwen3_5_moe")
"""Families of which a fast run tries a few changes."""
OTHER = {
    "rope.freq_base": 12_345.0,
    "attention.layer_norm_rms_epsilon": 1e-3,
    "attention.layer_norm_epsilon": 1e-3,
}
"""Values unlike the defaults of any class, without which the answer must change."""


def family(name: str, folder: Path) -> GgufFile:
    """The file of a family, as llama.cpp's converter writes it."""
    file = FILES[name]
    cls = getattr(transformers, file.family.architecture)
    model = cls.from_pretrained(file.family.save(folder / "model"), dtype=torch.float32)
    path = write(folder / "model.gguf", file, model)
    found = GgufFile.read(path)
    for key, value in OTHER.items():
        if (own := f"{found.architecture}.{key}") in found.keys:
            found.keys[own].value = value
    found.keys |= tokenizer(len(found.tensors["token_embd.weight"].data))
    return found


@dataclass(frozen=True)
class Change:
    label: str
    apply: Callable[[GgufFile], None]


def answer(path: Path, cache_dir: Path) -> tuple[object, ...]:
    """All that a user of the file sees: logits, the longest sequence, ids, ends and chats."""
    model = resolve(str(path), cache_dir=cache_dir)
    whole: Any = model.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    with torch.inference_mode():
        logits = whole(IDS).logits.numpy().tobytes()
    tokenizer: Any = model.tokenizer()
    chat = tokenizer.chat_template and tokenizer.apply_chat_template(
        [{"role": "user", "content": "!"}], tokenize=False, add_generation_prompt=True
    )
    ids = tuple(tokenizer(TEXT).input_ids)
    return logits, model.max_positions, ids, model.end_ids(tokenizer), chat


def changes(file: GgufFile, *, with_tokenizer: bool) -> Iterator[Change]:
    for name, key in file.keys.items():
        if name.startswith("tokenizer.") and not with_tokenizer:
            continue
        yield Change(f"without {name}", lambda own, name=name: own.keys.pop(name))
        for value in other_values(key.value):
            label = f"with another {name}: {str(value)[:30]}"
            yield Change(label, lambda own, name=name, value=value: setattr(own.keys[name], "value", value))
    for prefix in (
        "",
        "tokenizer.",
        "tokenizer.ggml.",
        f"{file.architecture}.",
        f"{file.architecture}.rope.",
    ):
        yield added_key(f"{prefix}unknown")
    for name, tensor in file.tensors.items():
        yield Change(f"without {name}", lambda own, name=name: own.tensors.pop(name))
        yield Change(f"with another {name}", lambda own, name=name: roll(own.tensors[name]))
        yield Change(f"with fewer rows of {name}", lambda own, name=name: cut(own.tensors[name]))
        stem, rows = name.rpartition(".")[0], tensor.data.shape[0]
        for end in ("bias", "scale", "weight.scale"):
            if f"{stem}.{end}" not in file.tensors:
                yield added_tensor(f"{stem}.{end}", rows)
    others = (
        "rope_freqs.weight blk.7.attn_norm.weight blk.0.attn_sinks.weight blk.0.attn_q_norm.weight unknown"
    )
    for name in others.split():
        if name not in file.tensors:
            yield added_tensor(name, 8)


def other_values(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield 2 * value or 1
            if value < 16:
                yield value + 1
        case float():
            yield value * 1.5
        case str():
            yield value + "x"
        case [_, *_]:
            yield value[:-1]
            yield value[::-1]


def added_key(name: str) -> Change:
    return Change(f"with {name}", lambda own: own.keys.update({name: Key(3, GGUFValueType.UINT32)}))


def added_tensor(name: str, size: int) -> Change:
    values = np.full(size, 2, np.float32)
    return Change(f"with {name}", lambda own: own.tensors.update({name: Tensor(values)}))


def roll(tensor: Tensor) -> None:
    tensor.data = np.roll(tensor.data, 1, -1) * np.float32(1.25)


def cut(tensor: Tensor) -> None:
    tensor.data = np.ascontiguousarray(tensor.data[:-1])


def check(name: str, tmp_path: Path, tried: slice) -> None:
    file = family(name, tmp_path)
    expected = answer(file.write(tmp_path / "before.gguf"), tmp_path / "before")
    for number, change in enumerate([*changes(file, with_tokenizer=name == "llama")][tried]):
        changed = copy.deepcopy(file)
        change.apply(changed)
        path = changed.write(tmp_path / f"{number}.gguf")
        try:
            found = answer(path, tmp_path / f"cache-{number}")
        except SwarmnetError:
            continue
        assert found != expected or is_harmless(file, change), f"{name} {change.label}"


def is_harmless(file: GgufFile, change: Change) -> bool:
    """Whether a change leaves the answer as it is."""
    prefix = f"{file.architecture}."
    own = {name.removeprefix(prefix): key.value for name, key in file.keys.items()}
    missing = change.label.removeprefix(f"without {prefix}")
    if missing in DEFAULTS and DEFAULTS[missing](own) == own[missing]:
        return True
    return any(re.fullmatch(each, change.label) for each in HARMLESS)


@pytest.mark.parametrize("name", FAST)
def test_a_change_of_a_file_changes_the_answer_or_is_refused(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, slice(FAST.index(name), None, STRIDE))


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_no_change_of_a_file_is_silent(name: str, tmp_path: Path) -> None:
    """Every key and every tensor: ``test_a_change_of_a_file_changes_the_answer_or_is_refused``
    tries a few."""
    check(name, tmp_path, slice(None))


def test_what_is_added_is_named(tmp_path: Path) -> None:
    added = "unknown tokenizer.unknown llama.unknown output.bias blk.7.attn_norm.weight blk.0.attn_q.scale"
    file = family("llama", tmp_path)
    wanted = [
        each
        for each in changes(file, with_tokenizer=True)
        if each.label.removeprefix("with ") in added.split()
    ]
    assert len(wanted) == len(added.split()) + 1  # a key and a tensor are unknown
    for number, change in enumerate(wanted):
        changed = copy.deepcopy(file)
        change.apply(changed)
        with pytest.raises(ConfigError, match=re.escape(change.label.removeprefix("with "))) as caught:
            answer(changed.write(tmp_path / f"{number}.gguf"), tmp_path / f"cache-{number}")
        assert caught.value.hint == "use the model's Hugging Face layout"
