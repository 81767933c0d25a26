"""Adapters of PEFT on a model: made for training, and written as PEFT reads them."""

import copy
import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import ConfigError, how_to_add

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"
"""PEFT's name of an adapter in a model. Files leave it out."""


def require_peft() -> None:
    """Raise ``ConfigError`` where PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("fine-tuning needs peft", hint=how_to_add("peft"))


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppress warnings between PEFT and transformers that a user can do nothing about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Position ids are not supported", UserWarning)
        yield


def lora_config(*, rank: int, alpha: int, targets: Sequence[str], task: str = "CAUSAL_LM") -> Any:
    """Return PEFT's config of LoRA without dropout. Without ``targets``, PEFT chooses modules."""
    import peft

    return peft.LoraConfig(
        task_type=peft.TaskType(task),
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(targets) or None,
    )


def attach(model: Any, name: str, config: Any, *, seed: int) -> Any:
    """Return a PEFT model around ``model``, called ``name``. The seed determines its initial
    parameters.

    Raises ``ValueError`` for a config that does not fit the model.
    """
    import torch
    from peft import get_peft_model

    with torch.random.fork_rng(), quiet_peft():
        torch.manual_seed(seed)
        tuned = get_peft_model(model, config)
    tuned.peft_config[_NAME].base_model_name_or_path = name
    return tuned


def linear_names(model: Any) -> str:
    """Return the names of the linear modules in a model's layers, as advice for users."""
    from torch import nn

    layers = [(name, module) for name, module in model.named_modules() if ".layers." in name]
    names = sorted({name.rpartition(".")[2] for name, module in layers if isinstance(module, nn.Linear)})
    return "choose among " + ", ".join(names)


def stored_name(name: str) -> str:
    """Return the name in files of an adapter's parameter."""
    return name.replace(f".{_NAME}.", ".")


def config_of(tuned: Any) -> Any:
    """Return the config of the adapter that ``attach`` made."""
    return tuned.peft_config[_NAME]


def write_adapter(config: Any, tensors: Mapping[str, Any], folder: Path) -> None:
    """Write an adapter of PEFT: its config, and ``tensors`` by their names in files."""
    from safetensors.torch import save_file

    config = copy.copy(config)
    config.inference_mode = True
    config.save_pretrained(folder)
    save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
