"""Checks of a job's model before a weight is loaded: its cuts, its data, its memory."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig

from swarmnet_node.training.model.building import trained_parameters, with_adapter
from swarmnet_node.training.model.config import CORRECT, checkpoint_of, model_config
from swarmnet_node.training.model.expert_balance import BIAS, share_biases
from swarmnet_node.training.model.subspace import check_subspace, numbers_in_subspace
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.partial_model import build_whole, causal_class, decoder_stack
from swarmnet_protocols.quantization.formats import PRECISIONS, UNQUANTIZED
from swarmnet_protocols.training.job_settings import Job, JobError, ModelSection, StagesSection
from swarmnet_protocols.training.memory_needs import (
    MemoryNeeds,
    activation_bytes,
    boundary_bytes,
    bytes_per_parameter,
)
from swarmnet_protocols.training.pipeline.stages import balanced_cuts, block_of

_MAX_LAYERS = 4096
"""Most layers of a model. Counting parameters builds every layer, which takes memory even on
"meta"."""


def parameters_by_block(config: PretrainedConfig, stages: StagesSection | None = None) -> Counter[int | None]:
    """Count the parameters of each block, and under None the parameters of the ends.

    ``stages``: count the parameters of a model in these stages. Raises ``JobError`` for impossible
    shapes.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > _MAX_LAYERS:
        raise JobError("model", "config", f"has {layers} layers, more than {_MAX_LAYERS}", hint=CORRECT)
    cls: Any = causal_class(config)
    try:
        with torch.device("meta"):
            model = cls(copy.deepcopy(config))
            share_biases(model)
    except (*CONFIG_FAULTS, RuntimeError, ZeroDivisionError) as error:
        raise JobError("model", "config", f"is wrong: {error}", hint=CORRECT) from error
    counts: Counter[int | None] = Counter()
    for name, parameter in model.named_parameters():
        trained = parameter.numel()
        if stages is not None:
            trained = numbers_in_subspace(name, parameter, stages, config.get_text_config().hidden_size)
        counts[block_of(name)] += trained
    return counts


def with_cuts(job: Job, cache_dir: Path) -> Job:
    """Return a job in stages with numbers for cuts, checked with the number of its model's blocks.

    Raises ``JobError`` for a model that cannot be cut so.
    """
    if job.stages is None:
        return job
    where = "checkpoint" if job.model.is_checkpoint else "config"
    config, stages = model_config(job.model, cache_dir), job.stages
    try:
        decoder_stack(config)
    except ConfigError as error:
        raise _not_cut(where, str(error)) from error
    check_subspace(stages, config)
    counts = parameters_by_block(config, stages)
    blocks = [counts[block] for block in range(config.num_hidden_layers)]
    if any(name.endswith(BIAS) for name in build_whole(config).empty().state_dict()):
        raise _not_cut(where, "the biases of its routers need the loads of all microbatches at once")
    cuts = stages.cuts
    if cuts == "auto":
        if stages.count > len(blocks) + 1:
            most = f"{len(blocks)} blocks make at most {len(blocks) + 1} stages"
            raise JobError("stages", "count", f"is {stages.count}, and {most}", hint="lower it")
        cuts = balanced_cuts(blocks, counts[None], stages.count)
    if cuts[-1] >= len(blocks):
        raise JobError(
            "stages",
            "cuts",
            f"has block {cuts[-1]}, and the model has the blocks 0 to {len(blocks) - 1}",
            hint="lower it",
        )
    return job.model_copy(update={"stages": stages.model_copy(update={"cuts": cuts})})


def _not_cut(where: str, why: str) -> JobError:
    return JobError(
        "model",
        where,
        f"cannot be trained in stages: {why}",
        hint="remove [stages], or use a family such as Llama, Mistral, Qwen3 or Qwen3-MoE",
    )


def check_model(
    job: Job, machine: TrainingMachine, *, vocab_size: int, stage: int | None = None
) -> MemoryNeeds:
    """Return the memory that a worker needs, from headers alone.

    ``stage``: the worker's stage, in a job that has stages. Raises ``JobError`` if the model does
    not fit the data or the memory.
    """
    config, memory = model_config(job.model, machine.cache_dir), machine.memory
    where = "checkpoint" if job.model.is_checkpoint else "config"
    if config.vocab_size < vocab_size:
        raise JobError(
            "model",
            where,
            f"has {config.vocab_size} tokens, but the tokenizer of [data] has {vocab_size}",
            hint=f"give the model a vocab_size of {vocab_size} or more, or choose another tokenizer",
        )
    positions = getattr(config, "max_position_embeddings", None) or job.data.sequence_length
    if job.data.sequence_length > positions:
        raise JobError(
            "data",
            "sequence_length",
            f"is more than the {positions} positions of the model",
            hint="shorten it, or raise max_position_embeddings",
        )
    counts = parameters_by_block(config, None if stage is None else job.stages)
    count = trained = sum(counts.values())
    activations = activation_bytes(job, config, recompute=memory.recompute)
    frozen_bytes = boundaries = 0
    if job.stages is not None and stage is not None:
        start, end = job.stages.spans(config.num_hidden_layers)[stage]
        trained = sum(counts[block] for block in range(start, end)) + (0 if stage else counts[None])
        activations = activation_bytes(
            job, config, recompute=memory.recompute, blocks=end - start, has_head=stage == 0
        )
        boundaries = boundary_bytes(job, config)
    if job.model.is_lora:
        local, quantized = checkpoint_of(job.model, machine.cache_dir), PRECISIONS.get(job.model.weights)
        if quantized is not None and local.precision.upper() not in {each.name for each in UNQUANTIZED}:
            raise JobError(
                "model",
                "weights",
                f"is {quantized.name!r}, but {local.name} is quantised already: {local.precision}",
                hint='use weights = "stored"',
            )
        trained = adapter_parameters(job.model, config)
        frozen_bytes = local.whole_bytes(quantized)
    each_bytes = bytes_per_parameter(job, eight_bit=memory.optimizer_states == "8bit")
    needs = MemoryNeeds(count, trained, frozen_bytes, round(trained * each_bytes), activations, boundaries)
    if needs.total_bytes > machine.available_bytes:
        raise JobError(
            "model",
            where,
            f"has {needs}, and {machine.available_bytes / 2**30:.1f} GiB are available",
            hint='allow more memory, or train a smaller model, an adapter (train = "lora") or a smaller microbatch',
        )
    return needs


def adapter_parameters(section: ModelSection, config: PretrainedConfig) -> int:
    """Count the parameters of the job's adapter without allocating the model.

    Raises ``JobError`` for targets that the model does not have.
    """
    model = with_adapter(build_whole(config).empty(), section, 0)
    return sum(parameter.numel() for _, parameter in trained_parameters(model))
