"""Reads and writes adapters in PEFT's format: ``adapter_config.json`` and
``adapter_model.safetensors``."""

import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_client.tuning.checkpoint import CHECKPOINT_FILE, UNFINISHED, replacing
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models.checkpoints.checkpoint import sha256_of
from swarmnet_protocols.models.peft_adapters import CONFIG_FILE, WEIGHTS_FILE, quiet_peft, require_peft

if TYPE_CHECKING:
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.session.adapters import Adapter

SUMMARY_FILE = "tune.json"
_PICKLE = "adapter_model.bin"
_METHODS = ("LORA", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")
"""Supported methods of PEFT. Others may load further adapters (XLORA) or pickles
(MULTITASK_PROMPT_TUNING) by name."""
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SUMMARY_BYTES = 64 << 20
_HINT = "name a directory that `swarmnet tune` or PEFT's save_pretrained() has written"


def check_adapter(directory: Path) -> dict[str, Any]:
    """Return the config of the adapter in ``directory``.

    Raises ``ConfigError`` or ``IntegrityError`` if it is missing or unsafe to load. PEFT itself
    would look for a missing file on the hub, read a pickle where there are no safetensors, and
    import a module that the config names.
    """
    if not (directory / CONFIG_FILE).is_file() and (directory / CHECKPOINT_FILE).is_file():
        raise ConfigError(
            f"the run in {directory} is not done",
            hint="repeat its `swarmnet tune` command to resume the run",
        )
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"{directory} is not an adapter: it has no {CONFIG_FILE}", hint=_HINT)
    if not (directory / WEIGHTS_FILE).is_file():
        if (directory / _PICKLE).exists():
            raise ConfigError(
                f"{directory} has its weights only as a pickle, which could run any program",
                hint="ask its author for safetensors: PEFT's save_pretrained(safe_serialization=True)",
            )
        raise ConfigError(f"{directory} is not an adapter: it has no {WEIGHTS_FILE}", hint=_HINT)
    _check_hashes(directory)
    config = _read_json(directory / CONFIG_FILE, _MAX_CONFIG_BYTES)
    if not isinstance(config.get("peft_type"), str):
        raise IntegrityError(f"{directory / CONFIG_FILE} does not name a peft_type", hint=_HINT)
    if config["peft_type"] not in _METHODS:
        raise ConfigError(
            f"the adapter in {directory} is {config['peft_type'][:40]}, which hosts cannot apply",
            hint=f"use one of {', '.join(_METHODS)}",
        )
    if config.get("megatron_config"):  # it names a module that PEFT would import
        raise ConfigError(f"the adapter in {directory} is for a Megatron model", hint=_HINT)
    return config


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of an adapter that ``check_adapter`` accepted, by name.

    Raises ``IntegrityError`` for a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise IntegrityError(f"{directory / WEIGHTS_FILE} is damaged: {error}", hint=_HINT) from error


def check_writes_text(directory: Path) -> dict[str, Any]:
    """Return the config of an adapter with which a model writes text. Raises as ``check_adapter``,
    and ``ConfigError`` for the adapter of a classifier."""
    config = check_adapter(directory)
    if config.get("task_type") not in {None, "CAUSAL_LM"}:
        raise ConfigError(
            f"the adapter in {directory} is for {config['task_type']}, which writes no text",
            hint="use it from Python: AutoSwarmModelForSequenceClassification",
        )
    return config


def check_made_for(directory: Path, manifest: bytes) -> None:
    """Raise ``ConfigError`` if ``swarmnet tune`` made the adapter for a model of another manifest
    hash."""
    if not (directory / SUMMARY_FILE).is_file():
        return
    summary = _read_json(directory / SUMMARY_FILE, _MAX_SUMMARY_BYTES)
    if summary.get("manifest") != manifest.hex():
        raise ConfigError(
            f"the adapter in {directory} is for another model: {summary.get('model')}",
            hint="name that model, or remove tune.json if you know that both are the same",
        )


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of an adapter, in hexadecimal, for its summary."""
    return {name: sha256_of(directory / name, None).hex() for name in (CONFIG_FILE, WEIGHTS_FILE)}


def _check_hashes(directory: Path) -> None:
    if not (directory / SUMMARY_FILE).is_file():
        return  # an adapter of another origin has no recorded hash
    hashes = _read_json(directory / SUMMARY_FILE, _MAX_SUMMARY_BYTES).get("files")
    if hashes is not None and hashes != hashes_of(directory):
        raise IntegrityError(
            f"the adapter in {directory} does not have the hashes in its {SUMMARY_FILE}",
            hint=f"get it again; if you trained it further, remove {SUMMARY_FILE}",
        )


def load_adapter(model: Any, directory: Path) -> Any:
    """Return ``model`` with the adapter of ``directory``, ready to generate.

    Raises ``ConfigError`` or ``IntegrityError`` for a directory without an adapter, or with an
    adapter for another model.
    """
    config = check_adapter(directory)
    require_peft()
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError

    made_for = config.get("base_model_name_or_path") or "another model"
    other = ConfigError(f"the adapter in {directory} does not fit this model", hint=f"it is for {made_for}")
    try:
        stored = stored_shapes(directory)
        if not ranks_fit(config, stored) or not _prompts_fit(config, model.config, stored):
            raise other
        with quiet_peft():
            # refused below
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            # LoRA matrices are created without memory. Loading gives memory to the matrices in the
            # file.
            adapted = PeftModel.from_pretrained(model, str(directory), low_cpu_mem_usage=True)
    except SafetensorError as error:
        raise IntegrityError(f"{directory / WEIGHTS_FILE} is damaged: {error}", hint=_HINT) from error
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        other.hint = f"{other.hint}; PEFT says: {reason[:300]}"
        raise other from error
    # With LoRA on the embeddings or the head, PEFT also stores the weight that it changes.
    states = [get_peft_model_state_dict(adapted, save_embedding_layers=each) for each in (False, True)]
    if stored not in [{name: tuple(value.shape) for name, value in state.items()} for state in states]:
        raise other
    return adapted.eval()


def read_lora(local: "LocalModel", directory: Path) -> "Adapter":
    """Return the LoRA pairs of an adapter as hosts receive them. No weight of the model is read.

    Raises what ``check_writes_text`` and ``load_adapter`` raise. Raises ``ConfigError`` if the
    adapter is for another model, or changes more than linear modules of the blocks: the other parts
    of the model are here, and all answers share them.
    """
    config = check_writes_text(directory)
    check_made_for(directory, local.manifest.hash)
    require_peft()
    import torch

    from swarmnet_client.model.client_adapter import adapter_of
    from swarmnet_client.model.placeholders import stand_ins
    from swarmnet_protocols.models.partial_model import build_whole

    if config["peft_type"] != "LORA" or any(".layers." not in name for name in stored_shapes(directory)):
        raise ConfigError(
            f"the adapter in {directory} is more than LoRA on the blocks",
            hint="an endpoint cannot share it: use `swarmnet run --adapter`, or tune with --method lora",
        )
    model: Any = build_whole(local.config).empty()
    model.base_model.layers = stand_ins(model.base_model.layers, torch.device("cpu"))
    load_adapter(model, directory)
    return adapter_of(model)


def _read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(max_bytes)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is not JSON", hint=_HINT) from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} is not a JSON object", hint=_HINT)
    return content


def ranks_fit(config: dict[str, Any], stored: dict[str, tuple[int, ...]]) -> bool:
    """Return whether every LoRA rank of the config is at most the largest dimension in the file.
    True for other methods."""
    if config["peft_type"] != "LORA":
        return True
    by_module = config.get("rank_pattern", {})
    if not isinstance(by_module, dict):
        return False
    largest = max((size for shape in stored.values() for size in shape), default=0)
    return all(type(rank) is int and rank <= largest for rank in (config.get("r"), *by_module.values()))


def _prompts_fit(config: dict[str, Any], model: Any, stored: dict[str, tuple[int, ...]]) -> bool:
    """Return whether the prompts of the config fit the model and the file. True for LoRA.

    PEFT would allocate whatever sizes the config states.
    """
    count, width = config.get("num_virtual_tokens"), config.get("token_dim")
    match config["peft_type"]:
        case "PROMPT_TUNING":
            shape = (count, model.hidden_size)
            return width == model.hidden_size and stored.get("prompt_embeddings") == shape
        case "P_TUNING":
            return stored.get("prompt_embeddings") == (count, width)
        case "PREFIX_TUNING":
            head_size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
            layers, heads = model.num_hidden_layers, model.num_key_value_heads
            wanted = {"num_layers": layers, "num_attention_heads": heads, "token_dim": heads * head_size}
            shape = (count, 2 * layers * heads * head_size)
            return wanted.items() <= config.items() and stored.get("prompt_embeddings") == shape
    return True


def save_adapter(tuned: Any, directory: Path) -> None:
    """Write the adapter of the PEFT model ``tuned``; each file is replaced atomically. Raises
    ``OutOfResources`` when the disk is full."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=UNFINISHED) as scratch:
        # By default PEFT would ask the hub whether the vocabulary has grown.
        tuned.save_pretrained(scratch, save_embedding_layers=False)
        for file in sorted(Path(scratch).iterdir()):
            with replacing(directory / file.name) as temporary:
                temporary.write_bytes(file.read_bytes())
