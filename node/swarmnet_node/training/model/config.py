"""The config and the checkpoint of a job's model."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.models import LocalModel, Progress, resolve
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.outline import fetch_outline
from swarmnet_protocols.models.partial_model import causal_class, decoder_stack
from swarmnet_protocols.training.job_settings import JobError, ModelSection, is_published

if TYPE_CHECKING:
    from swarmnet_protocols.fetching.peers import SwarmPeers

CORRECT = "compare [model.config] with the config.json of a model of this kind"
"""The hint of an error about a config."""
_MISSPELT = 0.9
"""An unknown key counts as misspelt if it is at least this similar, in [0, 1], to a known key. A
lower bound rejects keys of other versions of transformers; a higher one lets typos pass."""


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
        raise JobError("model", "config", f"is wrong: {error}", hint=CORRECT) from error
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
    return f"did you mean {close[0]!r}?" if close else CORRECT
