"""Adapters in the form of PEFT, and in the form in which they travel."""

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora import Linear


def with_lora(model: Any, targets: Sequence[str], *, rank: int = 4, seed: int = 0) -> Any:
    """``model`` with random LoRA pairs at ``targets``."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuned = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.2)
    return tuned.eval()


def with_prefix(model: Any, positions: int, *, seed: int = 0) -> Any:
    """``model`` behind a random prefix."""
    text = model.config
    heads = text.num_key_value_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=positions,
        num_attention_heads=heads,
        token_dim=heads * size,
        num_layers=text.num_hidden_layers,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config).eval()


def lora_tensors(tuned: Any) -> dict[str, torch.Tensor]:
    """The LoRA pairs of a PEFT model under the names of this project."""
    tensors = {}
    for name, module in tuned.named_modules():
        if isinstance(module, Linear):
            block, _, path = name.split(".layers.")[1].partition(".")
            up = module.lora_B["default"].weight * module.scaling["default"]
            tensors[f"{block}.{path}.down"] = module.lora_A["default"].weight.detach()
            tensors[f"{block}.{path}.up"] = up.detach()
    return tensors


def prefix_tensors(tuned: Any) -> dict[str, torch.Tensor]:
    """The prefix of a PEFT model under the names of this project."""
    config = tuned.active_peft_config
    cached = tuned.prompt_encoder["default"].embedding.weight.detach()
    states = cached.view(config.num_virtual_tokens, 2 * config.num_layers, config.num_attention_heads, -1)
    states = states.permute(1, 2, 0, 3)
    names = [f"{block}.prefix.{kind}" for block in range(config.num_layers) for kind in ("key", "value")]
    return dict(zip(names, states.clone(), strict=True))


def random_tensors(
    blocks: Sequence[int],
    *,
    modules: Sequence[tuple[str, int, int]] = (("self_attn.q_proj", 32, 32),),
    rank: int = 4,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """LoRA pairs for ``modules``, given as (path, outputs, inputs), of ``blocks``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for block in blocks:
        for path, outputs, inputs in modules:
            tensors[f"{block}.{path}.down"] = torch.randn(rank, inputs, generator=generator) * 0.2
            tensors[f"{block}.{path}.up"] = torch.randn(outputs, rank, generator=generator) * 0.2
    return tensors
