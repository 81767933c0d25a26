"""The model of a job: checked, built from a config or a checkpoint, and written in Hugging Face
layout."""

import copy
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.utils import logging

from swarmnet_node.training.initial_weights import draw_weights
from swarmnet_node.training.shared_state import pack
from swarmnet_node.training.steps.expert_balance import BIAS, share_biases
from swarmnet_node.training.steps.subspace import check_subspace, numbers_in_subspace
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError, IntegrityError, Unreachable
from swarmnet_protocols.models import LocalModel, Progress, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS, WeightForm
from swarmnet_protocols.models.checkpoints.safetensors_file import SafetensorsCheckpoint
from swarmnet_protocols.models.outline import fetch_outline
from swarmnet_protocols.models.partial_model import build_whole, causal_class, decoder_stack
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
from swarmnet_protocols.quantization.formats import PRECISIONS, UNQUANTIZED
from swarmnet_protocols.training.job_settings import (
    Job,
    JobError,
    ModelSection,
    StagesSection,
    is_published,
)
from swarmnet_protocols.training.memory_needs import (
    MemoryNeeds,
    activation_bytes,
    boundary_bytes,
    bytes_per_parameter,
)
from swarmnet_protocols.training.pipeline.stages import balanced_cuts, block_of

if TYPE_CHECKING:
    from swarmnet_protocols.fetching.peers import SwarmPeers

_CPU = torch.device("cpu")
_CORRECT = "compare [model.config] with the config.json of a model of this kind"
_MISSPELT = 0.9
"""An unknown key counts as misspelt if it is at least this similar, in [0, 1], to a known key. A
lower bound rejects keys of other versions of transformers; a higher one lets typos pass."""
STAGE_FILE = "stage.safetensors"
"""The weights of a stage in a checkpoint, with their names in the whole model. So the file does not
depend on the cuts."""
_MAX_LAYERS = 4096
"""Most layers of a model. Counting parameters builds every layer, which takes memory even on
"meta"."""


def checkpoint_of(
    section: ModelSection,
    cache_dir: Path,
    progress: Progress | None = None,
    peers: "SwarmPeers | None" = None,
) -> LocalModel:
    """Return the checkpoint that the job starts from. Missing files come from ``peers`` first.

    Raises ``JobError`` for an unknown name, or for other files than the job's.
    """
    name = str(section.checkpoint)
    find = partial(resolve, name, cache_dir=cache_dir, progress=progress, published=is_published(name))
    try:
        local = find()
    except (ConfigError, Unreachable) as error:
        if peers is not None and section.manifest is not None and is_published(name) and peers.wait():
            manifest = bytes.fromhex(section.manifest)
            peers.run(lambda: fetch_outline(peers, name, manifest, cache_dir))
            local = find()
        elif isinstance(error, ConfigError):
            raise JobError("model", "checkpoint", f"is wrong: {error}", hint=error.hint) from error
        else:
            raise
    local.parts.peers = peers
    if section.manifest not in (None, local.manifest.hash.hex()):
        raise JobError(
            "model",
            "manifest",
            f"is {section.manifest}, but {name} has the manifest {local.manifest.hash.hex()}: the job was created with other files",
            hint="get the files that the job was created with",
        )
    return local


def model_config(section: ModelSection, cache_dir: Path) -> PretrainedConfig:
    """Return the transformers config of the job's model. Raises ``JobError`` if transformers
    rejects it."""
    from huggingface_hub.errors import StrictDataclassError

    if section.checkpoint is not None:
        return checkpoint_of(section, cache_dir).config
    settings = dict(section.config or {})
    if private := [key for key in settings if key.startswith("_")]:
        raise JobError("model.config", private[0], "is a private key of transformers", hint="remove it")
    kind = str(settings.pop("model_type"))
    if kind not in CONFIG_MAPPING:
        raise JobError(
            "model",
            "config",
            f"is wrong: there is no model_type {kind[:64]!r}",
            hint=_suggestion(kind, CONFIG_MAPPING),
        )
    try:
        config: PretrainedConfig = AutoConfig.for_model(kind, **settings)
        causal_class(config)
    except (*CONFIG_FAULTS, StrictDataclassError, ConfigError) as error:
        raise JobError("model", "config", f"is wrong: {error}", hint=_CORRECT) from error
    _check_spelling(settings, config)
    return config


def obstacle_to_hosts(section: ModelSection, cache_dir: Path) -> str | None:
    """Return why hosts cannot serve the trained model in blocks, or None if they can."""
    config = model_config(section, cache_dir)
    try:
        decoder_stack(config)
    except ConfigError as error:
        return str(error)
    return None


def _check_spelling(settings: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise ``JobError`` for a misspelt key. transformers would silently use a default.

    Unknown keys that resemble no known key are accepted: configs of other versions of transformers
    have some.
    """
    try:
        known = [*type(config)().to_dict(), *config.attribute_map]
    except CONFIG_FAULTS:  # a model type without defaults
        return
    for key in settings:
        if key not in known and get_close_matches(key, known, n=1, cutoff=_MISSPELT):
            raise JobError("model.config", key, "is an unknown key", hint=_suggestion(key, known))


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else _CORRECT


def parameter_count(config: PretrainedConfig) -> int:
    """Count the parameters without allocating them.

    Raises ``JobError`` for impossible shapes.
    """
    return sum(parameters_by_block(config).values())


def parameters_by_block(config: PretrainedConfig, stages: StagesSection | None = None) -> Counter[int | None]:
    """Count the parameters of each block, and under None the parameters of the ends.

    ``stages``: count the parameters of a model in these stages. Raises ``JobError`` for impossible
    shapes.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    if layers > _MAX_LAYERS:
        raise JobError("model", "config", f"has {layers} layers, more than {_MAX_LAYERS}", hint=_CORRECT)
    cls: Any = causal_class(config)
    try:
        with torch.device("meta"):
            model = cls(copy.deepcopy(config))
            share_biases(model)
    except (*CONFIG_FAULTS, RuntimeError, ZeroDivisionError) as error:
        raise JobError("model", "config", f"is wrong: {error}", hint=_CORRECT) from error
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
    job: Job,
    machine: TrainingMachine,
    *,
    vocab_size: int,
    stage: int | None = None,
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


def build_model(  # noqa: PLR0913 - all by name but the first
    section: ModelSection,
    seed: int,
    cache_dir: Path,
    progress: Progress = lambda *_: None,
    *,
    device: torch.device = _CPU,
    local: LocalModel | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return the job's model in ``dtype`` on the CPU. With an adapter, it is on ``device``, and its
    frozen weights stay packed.

    Without a checkpoint, its weights are drawn from ``seed``, bit-identical with the same torch
    build. torch's global generator is left unchanged. ``local``: the checkpoint, if it is open.
    """
    model: Any
    if section.checkpoint is not None:
        local = local or checkpoint_of(section, cache_dir, progress)
        progress(f"loading {section.checkpoint}", 0, None)
        if section.is_lora:
            quantized = PRECISIONS.get(section.weights)
            frozen = local.load_whole(dtype=torch.float32, device=device, packed=True, quantized=quantized)
            model = with_adapter(frozen, section, seed)
            model.train()
            return model
        model = local.load_whole(dtype=dtype, device=_CPU)
    else:
        config = model_config(section, cache_dir)
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
    cpu = torch.device("cpu")
    model = build_whole(config).load(
        lambda empty: checkpoint.state_dict(checkpoint.tensor_names, 0, empty, WeightForm(cpu)),
        dtype=config.dtype or torch.float32,
        device=cpu,
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
