"""Merges LoRA adapters of one model into one, with PEFT's arithmetic and without the model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_client.tuning.adapter_dir import check_adapter, ranks_fit, stored_shapes
from swarmnet_client.tuning.methods import MergeMethod
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import creating
from swarmnet_protocols.models.peft_adapters import quiet_peft, require_peft, write_adapter

if TYPE_CHECKING:
    import torch

_MERGED = "merged"


def merge(
    directories: Sequence[Path],
    weights: Sequence[float],
    method: MergeMethod,
    density: float,
    target: Path,
    *,
    overwrite: bool,
) -> None:
    """Write the merged adapter into the new directory ``target``.

    ``density``: the share of each adapter's values that methods which prune keep. Raises
    ``ConfigError`` for adapters that are not LoRA on linear modules of one model, or whose ranks
    the method cannot combine.
    """
    require_peft()
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict

    configs = [check_adapter(each) for each in directories]
    shapes = [stored_shapes(each) for each in directories]
    bases = {config.get("base_model_name_or_path") for config in configs}
    if len(bases) > 1:
        raise ConfigError(f"the adapters are for different models: {', '.join(map(str, bases))}")
    if any(config["peft_type"] != "LORA" for config in configs):
        raise ConfigError("only LoRA adapters can be merged")
    if not all(map(ranks_fit, configs, shapes)):
        raise ConfigError("an adapter states a higher rank than its weights have")
    if any(_linear_shapes(each) != _linear_shapes(shapes[0]) for each in shapes):
        raise ConfigError("the adapters change different modules", hint="merge adapters of equal targets")
    names = [f"adapter{number}" for number in range(len(directories))]
    prunes = method not in (MergeMethod.LINEAR, MergeMethod.CAT, MergeMethod.SVD)
    try:
        with quiet_peft(), torch.random.fork_rng():
            torch.manual_seed(0)
            first = LoraConfig.from_pretrained(str(directories[0]))
            task, first.task_type = first.task_type, None  # a task needs the model's own class
            adapted = PeftModel.from_pretrained(
                _skeleton(shapes[0]), str(directories[0]), names[0], config=first
            )
            for name, directory in zip(names[1:], directories[1:], strict=True):
                adapted.load_adapter(str(directory), name)
            options = {"density": density} if prunes else {}
            adapted.base_model.add_weighted_adapter(names, list(weights), _MERGED, str(method), **options)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"PEFT: {reason[:300]}", hint="cat and svd merge any ranks") from error
    config = adapted.peft_config[_MERGED]
    config.task_type, config.base_model_name_or_path = task, next(iter(bases))
    with creating(target, mode=0o755, overwrite=overwrite) as folder:
        write_adapter(config, get_peft_model_state_dict(adapted, adapter_name=_MERGED), folder)


def _linear_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each linear module that an adapter changes, by its path.

    Raises ``ConfigError`` if the adapter holds anything else.
    """
    found = {}
    for name, shape in shapes.items():
        path, kind, end = name.rpartition(".lora_A")
        if not kind and ".lora_B." in name:
            continue
        partner = shapes.get(f"{path}.lora_B{end}", ())
        if not kind or len(shape) != 2 or len(partner) != 2:
            raise ConfigError(f"{name[:200]} is no LoRA pair of a linear module")
        found[path.removeprefix("base_model.model.")] = (partner[0], shape[1])
    return found


def _skeleton(shapes: Mapping[str, Sequence[int]]) -> "torch.nn.Module":
    """Return a model of the linear modules that an adapter changes, whose weights are never
    read."""
    from torch import nn

    root = nn.Module()
    for path, (outputs, inputs) in _linear_shapes(shapes).items():
        *folders, leaf = path.split(".")
        parent = root
        for name in folders:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        linear: nn.Module = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)  # type: ignore[no-untyped-call]
        parent.add_module(leaf, linear)
    return root
