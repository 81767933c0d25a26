"""The methods of ``swarmnet tune``, each a PEFT configuration, and the settings of a run."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from swarmnet_protocols.errors import ConfigError, how_to_add


class TuneMethod(StrEnum):
    LORA = "lora"
    PROMPT = "prompt"
    DEEP_PROMPT = "deep-prompt"
    CLASSIFIER = "classifier"


LEARNING_RATES = {
    TuneMethod.LORA: 1e-3,
    TuneMethod.PROMPT: 3e-2,
    TuneMethod.DEEP_PROMPT: 1e-2,
    TuneMethod.CLASSIFIER: 1e-3,
}
"""Default learning rates. Those of the prompt methods are from PEFT's examples."""
_PROMPTS = {TuneMethod.PROMPT, TuneMethod.DEEP_PROMPT}


@dataclass(frozen=True)
class TuneSettings:
    """The settings of a run. The same settings and data give the same adapter.

    - ``steps``: number of batches; None for ``epochs`` passes over all rows.
    - ``held_out``: share of the rows to evaluate on, unless there is an evaluation file.
    - ``warmup``: share of the steps while the learning rate grows.
    - ``max_length``: most tokens of a row.
    - ``rank``, ``alpha``, ``target_modules``: for LoRA; no modules means PEFT's choice for the
      architecture.
    - ``virtual_tokens``: for the prompt methods.
    """

    method: TuneMethod
    learning_rate: float
    steps: int | None = None
    epochs: int = 3
    batch_size: int = 8
    max_length: int = 256
    held_out: float = 0.1
    seed: int = 0
    rank: int = 8
    alpha: int = 16
    target_modules: tuple[str, ...] = ()
    virtual_tokens: int = 16
    warmup: float = 0.06

    @property
    def prefix_length(self) -> int:
        """Positions in front of every row."""
        return self.virtual_tokens if self.method in _PROMPTS else 0

    def to_json(self) -> dict[str, Any]:
        """Return the settings that the method uses."""
        fields = asdict(self) | {"method": str(self.method), "target_modules": list(self.target_modules)}
        unused = {"rank", "alpha", "target_modules"} if self.method in _PROMPTS else {"virtual_tokens"}
        return {name: value for name, value in fields.items() if name not in unused}


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


def attach(model: Any, name: str, settings: TuneSettings) -> Any:
    """Return a PEFT model around ``model``, called ``name``. The seed determines its initial
    parameters.

    Raises ``ConfigError`` for settings that do not fit the model.
    """
    import torch
    from peft import get_peft_model

    with torch.random.fork_rng(), quiet_peft():
        torch.manual_seed(settings.seed)
        if settings.method == TuneMethod.CLASSIFIER:
            model.score.reset_parameters()
        try:
            tuned = get_peft_model(model, _config(settings))
        except ValueError as error:
            raise ConfigError(f"PEFT: {error}", hint=f"--target-modules: {_linear_names(model)}") from error
    tuned.peft_config["default"].base_model_name_or_path = name
    return tuned


def _config(settings: TuneSettings) -> Any:
    import peft

    task = peft.TaskType.SEQ_CLS if settings.method == TuneMethod.CLASSIFIER else peft.TaskType.CAUSAL_LM
    match settings.method:
        case TuneMethod.PROMPT:
            return peft.PromptTuningConfig(
                task_type=task,
                num_virtual_tokens=settings.virtual_tokens,
                prompt_tuning_init=peft.PromptTuningInit.SAMPLE_VOCAB,
            )
        case TuneMethod.DEEP_PROMPT:
            return peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=settings.virtual_tokens)
        case _:
            return peft.LoraConfig(
                task_type=task,
                r=settings.rank,
                lora_alpha=settings.alpha,
                lora_dropout=0.0,
                target_modules=list(settings.target_modules) or None,
            )


def _linear_names(model: Any) -> str:
    from torch import nn

    layers = [(name, module) for name, module in model.named_modules() if ".layers." in name]
    names = sorted({name.rpartition(".")[2] for name, module in layers if isinstance(module, nn.Linear)})
    return "choose among " + ", ".join(names)
