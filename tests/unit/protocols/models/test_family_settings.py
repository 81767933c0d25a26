"""Every setting of every family is read as transformers reads it, refused by name, or known to be
harmless."""

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.unread import HARMLESS
from tests.support.models.hub_families import FAMILIES, Family
from tests.support.models.rounding import NEAR
from tests.support.models.tensor_layers import TensorLayers

CPU = torch.device("cpu")
IDS = torch.randint(6, 100, (40,), generator=torch.Generator().manual_seed(1))
STRIDE = 40
"""One of so many changes is tried in a fast run."""
FAST = ("deepseek_v2", "gpt_oss", "gemma3")
"""Families of which a fast run tries a few changes."""
Settings = dict[str, Any]
Place = tuple[str, ...]
"""A setting, and the parameter in it if it has some."""
NO_EFFECT = {
    ("gemma4", "top_k_experts"): "no layer has experts",
    ("gemma4", "moe_intermediate_size"): "no layer has experts",
    ("falcon_h1", "mamba_expand"): "mamba_d_ssm comes first",
    ("falcon_h1", "mamba_norm_before_gate"): "mamba_rms_norm is off",
    ("lfm2", "block_dim"): "the class has hidden_size",
    ("qwen3_5_moe", "intermediate_size"): "no layer is dense",
}
"""Settings of families that are read, and that do nothing in these models: why."""
ADDED = {"unknown": 3}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
TOGETHER: dict[str, Settings] = {
    "use_sliding_window": WINDOWS,
    "sliding_window": WINDOWS,
    "max_window_layers": WINDOWS,
    "enable_moe_block": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}
"""Settings with which another one has an effect."""


@dataclass(frozen=True)
class Change:
    place: Place
    value: Any

    @property
    def label(self) -> str:
        return f"{'.'.join(self.place)} = {str(self.value)[:40]}"

    def apply(self, text: Settings) -> None:
        text |= TOGETHER.get(self.place[0], {})
        for name in self.place[:-1]:
            text = text[name]
        text[self.place[-1]] = self.value


def text_of(settings: Settings) -> Settings:
    found: Settings = settings.get("text_config", settings)
    return found


def changes(path: Path) -> Iterator[Change]:
    """One changed setting each: those in the file, and all that the config's class declares."""
    text = text_of(json.loads((path / "config.json").read_text()))
    config: Any = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
    declared = {each.name: each.default for each in fields(config) if each.default is not MISSING}
    values = declared | text
    for name, value in values.items():
        if isinstance(value, dict) and name in text:
            for inner, parameter in (value | ADDED).items():
                for other in others(inner, parameter):
                    yield Change((name, inner), other)
            yield Change((name,), None)
        else:
            for other in others(name, value):
                yield Change((name,), other)


def others(name: str, value: Any) -> Iterator[Any]:
    """Other values of a setting, some of which must change answers."""
    if name in OTHER:
        yield OTHER[name]
    match value:
        case bool():
            yield not value
        case int():
            yield 2 * value or 1
            yield value + 1
        case float():
            yield value * 1.5 + 0.1
        case str():
            yield value + "x"
            yield "gelu"
        case [_, *_]:
            yield value[:-1]
            yield value[::-1]
        case None:
            yield 1
    if value is not None:
        yield None


OTHER: Settings = {
    "topk_method": "greedy",
    "position_embedding_type": "rope",
    "type": "linear",
    "rope_type": "linear",
    "sliding_window": 5,
    "swiglu_limit": 0.01,
    "high_freq_factor": 20.0,
    "low_freq_factor": 0.2,
    "beta_fast": 0.01,
    "beta_slow": 0.001,
    "original_max_position_embeddings": 100_000,
}
"""Values that such small models notice."""


class Transformers:
    """What transformers computes for a directory."""

    def __init__(self, family: Family) -> None:
        self.cls: Any = getattr(transformers, family.architecture)

    def logits(self, path: Path) -> torch.Tensor:
        model, info = self.cls.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"]:
            raise ValueError(f"no weights of {min(info['missing_keys'])}")
        with torch.inference_mode():
            found: torch.Tensor = model(IDS[None], return_dict=True, use_cache=False).logits[0]
        return found


def our_logits(path: Path, cache_dir: Path) -> torch.Tensor:
    model = resolve(str(path), cache_dir=cache_dir)
    local_layers = TensorLayers(model)
    rows = local_layers.embed(IDS)
    for start, end in itertools.pairwise(sorted({0, 1, model.manifest.blocks})):
        stage = load_stage(model, start, end, dtype=torch.float32, device=CPU)
        [rows] = stage.forward([(stage.new_sequence(), rows)])
    return local_layers.logits(rows)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def faults(name: str, folder: Path, tried: slice) -> Iterator[str]:
    """Settings that are silently wrong, that nothing reads, or that fail without a clear error."""
    family = FAMILIES[name]
    path = family.save(folder / "model")
    settings = json.loads((path / "config.json").read_text())
    reference = Transformers(family)
    before = reference.logits(path)
    assert error_of(our_logits(path, folder / "before"), before) < NEAR
    by_place: dict[Place, list[Change]] = {}
    for change in changes(path):
        by_place.setdefault(change.place, []).append(change)
    for place, same in [*by_place.items()][tried]:
        outcomes = set()
        for number, change in enumerate(same):
            changed = copy.deepcopy(settings)
            change.apply(text_of(changed))
            (path / "config.json").write_text(json.dumps(changed))
            cache_dir = folder / f"{'.'.join(place)}-{number}"
            outcome = outcome_of(change, path, cache_dir, reference, before)
            COUNTS[outcome if outcome in OUTCOMES else "wrong"] += 1
            if outcome not in OUTCOMES:
                yield f"{name} {change.label}: {outcome}"
            outcomes.add(outcome)
        nulls = all(each.value is None for each in same)
        if (
            outcomes <= {SAME}
            and not nulls
            and not is_harmless(place)
            and (name, ".".join(place)) not in NO_EFFECT
        ):
            yield f"{name} {'.'.join(place)}: does nothing, as {[each.value for each in same]}"


CHANGED, SAME, REFUSED = OUTCOMES = ("changed as in transformers", "did nothing", "refused by name")
COUNTS: Counter[str] = Counter()


def outcome_of(
    change: Change, path: Path, cache_dir: Path, reference: Transformers, before: torch.Tensor
) -> str:
    """One of ``OUTCOMES``, or what is wrong."""
    try:
        found = our_logits(path, cache_dir)
    except SwarmnetError as error:
        return REFUSED if is_named(change, str(error)) else f"refused without its name: {error}"
    except Exception as error:  # noqa: BLE001 - any other exception is what this test looks for
        return f"fails: {error!r}"
    try:
        expected = reference.logits(path)
    except Exception as error:  # noqa: BLE001 - however transformers fails
        if not is_harmless(change.place):
            return f"fails in transformers only: {error!r}"
        expected = before
    if not error_of(found, expected) < NEAR:
        return "gives another answer than transformers"
    return SAME if error_of(expected, before) == 0 else CHANGED


def is_named(change: Change, message: str) -> bool:
    """Whether a message names the setting, its value, or the tensor that it does not fit."""
    if "other state" in message or "can be built" in message:
        return True  # layers fail where they compute with it
    name = change.place[-1]
    names = (
        name,
        name.removeprefix("num_").replace("_", " "),
        "the tensor",
        "does not fit",
        "reads as",
        "mrope_section",
        "no_rope_layers",
        "validate_",
    )
    return any(each in message for each in names) or str(change.value) in message


def is_harmless(place: Place) -> bool:
    return any(each.fullmatch(name) for each in HARMLESS.values() for name in place)


@pytest.mark.parametrize("name", FAST)
def test_a_changed_setting_is_read_or_refused_or_harmless(name: str, tmp_path: Path) -> None:
    assert [*faults(name, tmp_path, slice(FAST.index(name), None, STRIDE))] == []


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_changed_setting_is_silent(name: str, tmp_path: Path) -> None:
    """Every setting: ``test_a_changed_setting_is_read_or_refused_or_harmless`` tries a few."""
    assert [*faults(name, tmp_path, slice(None))] == []
