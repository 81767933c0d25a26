"""Builds the model of a job, and writes it in Hugging Face layout."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from swarmnet_node.training.model.config import checkpoint_of, model_config
from swarmnet_node.training.model.expert_balance import share_biases
from swarmnet_node.training.model.initial_weights import draw_weights
from swarmnet_node.training.shared_state import pack
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.checkpoints.checkpoint import WeightForm
from swarmnet_protocols.models.checkpoints.safetensors_file import SafetensorsCheckpoint
from swarmnet_protocols.models.partial_model import build_whole, causal_class
from swarmnet_protocols.models.peft_adapters import (
    WEIGHTS_FILE,
    attach,
    config_of,
    linear_names,
    lora_config,
    require_peft,
    stored_name,
    write_adapter,
)
from swarmnet_protocols.models.public_names import name_for_peers
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.training.job_settings import Job, JobError, ModelSection
from swarmnet_protocols.training.methods import ZeroOrder

_CPU = torch.device("cpu")
STAGE_FILE = "stage.safetensors"
"""The weights of a stage in a checkpoint, with their names in the whole model. So the file does not
depend on the cuts."""


def with_adapter(model: Any, section: ModelSection, seed: int) -> Any:
    """Return a PEFT model around ``model`` with a new adapter.

    Its parameters are float32 and drawn from ``seed``, equal on every device.
    Raises ``JobError`` for targets that the model does not have.
    """
    require_peft()
    name, _, revision = name_for_peers(section.checkpoint or "").partition("@")
    made = lora_config(rank=section.rank, alpha=section.alpha, targets=section.targets)
    made.revision = revision or None
    try:
        tuned = attach(model, name, made, seed=seed)
    except ValueError as error:
        raise JobError("model", "targets", f"is wrong: {error}", hint=linear_names(model)) from error
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in trained_parameters(tuned):
        drawn = torch.empty(parameter.shape)
        if "lora_A" in path:
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        else:
            drawn.zero_()
        if not parameter.is_meta:
            parameter.data = drawn.to(parameter.device)
    return tuned


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that a job trains, with their names, in the order of its vectors.

    The parameters of an adapter or of a stage are sorted by name, because their files keep no other
    order.
    """
    found = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return sorted(found, key=itemgetter(0)) if is_adapted(model) or is_stage(model) else found


def is_adapted(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has an adapter."""
    return hasattr(model, "peft_config")


def is_stage(model: torch.nn.Module) -> bool:
    """Return whether ``model`` is a stage of another model, whose names its parameters have."""
    return hasattr(model, "modules_in_whole")


def build_model(job: Job, machine: TrainingMachine, local: LocalModel | None = None) -> PreTrainedModel:
    """Return the job's model on the CPU, in the format of its method.

    A model with an adapter is on the machine's device, and its frozen weights stay packed. Without
    a checkpoint, the job's seed draws the weights, bit-identical with the same torch build. torch's
    global generator is left unchanged. ``local``: the checkpoint, if it is open.
    """
    section, seed, method = job.model, job.job.seed, job.make_method()
    dtype = method.dtype if isinstance(method, ZeroOrder) else torch.float32
    model: Any
    if section.checkpoint is not None:
        local = local or checkpoint_of(section, machine.cache_dir, machine.progress)
        machine.progress(f"loading {section.checkpoint}", 0, None)
        if section.is_lora:
            quantized = PRECISIONS.get(section.weights)
            frozen = local.load_whole(
                dtype=torch.float32, device=machine.device, packed=True, quantized=quantized
            )
            model = with_adapter(frozen, section, seed)
            model.train()
            return model
        model = local.load_whole(dtype=dtype, device=_CPU)
    else:
        config = model_config(section, machine.cache_dir)
        cls: Any = causal_class(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for weights that the class sets in a way of its own
            model = cls(config).to(torch.float32)
        draw_weights(model, model.named_modules(), seed)
        for parameter in model.parameters():  # buffers, such as frequencies, stay float32
            parameter.data = parameter.data.to(dtype)
    share_biases(model)
    model.train().requires_grad_(True)
    return model


def write_model(model: PreTrainedModel, parameters: torch.Tensor, folder: Path) -> None:
    """Write a checkpoint in Hugging Face layout, an adapter in PEFT's, or a stage in one file.

    It has the architecture of ``model`` and the values of ``parameters``, flat ``[n]``.
    """
    named, done = {}, 0
    for name, parameter in trained_parameters(model):
        part = parameters[done : done + parameter.numel()]
        named[name] = part.detach().to("cpu", copy=not is_stage(model)).view(parameter.shape)
        done += parameter.numel()
    if is_adapted(model):
        write_adapter(config_of(model), {stored_name(name): each for name, each in named.items()}, folder)
        return
    if is_stage(model):
        with (folder / STAGE_FILE).open("wb") as stream:  # save_file would copy all tensors
            stream.writelines(pack(named))
        return
    save_whole(model, named, folder)


def save_whole(model: Any, named: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a checkpoint in Hugging Face layout: the architecture of ``model``, which may be empty,
    and the weights ``named``."""
    dtype = next(iter(named.values())).dtype
    with _no_progress_bar():
        model.save_pretrained(folder, state_dict=named)
    # transformers names the format that the model computes in
    update_json(folder / "config.json", {"dtype": str(dtype).removeprefix("torch.")})


def update_json(path: Path, changes: dict[str, Any]) -> None:
    """Replace these keys of a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_model(folder: Path) -> torch.Tensor:
    """Return the parameters that ``write_model`` wrote, flat ``[n]``.

    Raises ``ConfigError`` or ``IntegrityError`` if the checkpoint is invalid.
    """
    for name in (WEIGHTS_FILE, STAGE_FILE):
        if (folder / name).is_file():
            return torch.cat([each.reshape(-1) for _, each in sorted(load_file(folder / name).items())])
    checkpoint = SafetensorsCheckpoint(folder)
    config = checkpoint.config()
    model = build_whole(config).load(
        lambda empty: checkpoint.state_dict(checkpoint.tensor_names, 0, empty, WeightForm(_CPU)),
        dtype=config.dtype or torch.float32,
        device=_CPU,
    )
    share_biases(model)
    return flatten(list(model.parameters()))


def flatten(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters into one vector ``[n]``, and make them views of it.

    They move one after another, so memory never holds two copies of a model.
    """
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split_with_sizes(flat, sizes), strict=True):
        view = part.view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
    return flat


def check_flat(values: torch.Tensor, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ``values`` if they are ``[count]`` of ``dtype``. Raises ``IntegrityError``
    otherwise."""
    if values.shape != (count,) or values.dtype != dtype:
        raise IntegrityError(f"expected {count} values of {dtype}, not {values.dtype} {tuple(values.shape)}")
    return values
