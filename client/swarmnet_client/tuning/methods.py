"""The methods of ``swarmnet tune``, each a PEFT configuration, and the settings of a run."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import peft_adapters
from swarmnet_protocols.models.peft_adapters import linear_names, lora_config


class TuneMethod(StrEnum):
    LORA = "lora"
    PROMPT = "prompt"
    DEEP_PROMPT = "deep-prompt"
    CLASSIFIER = "classifier"
    ZO = "zo"
    ES = "es"


class MergeMethod(StrEnum):
    """A way in which PEFT combines adapters. All but ``cat`` and ``svd`` need equal ranks."""

    TIES = "ties"
    LINEAR = "linear"
    CAT = "cat"
    SVD = "svd"
    DARE_TIES = "dare_ties"
    DARE_LINEAR = "dare_linear"
    MAGNITUDE_PRUNE = "magnitude_prune"


LEARNING_RATES = {
    TuneMethod.LORA: 1e-3,
    TuneMethod.PROMPT: 3e-2,
    TuneMethod.DEEP_PROMPT: 1e-2,
    TuneMethod.CLASSIFIER: 1e-3,
    TuneMethod.ZO: 1e-4,
    TuneMethod.ES: 4e-2,
}
"""Default learning rates. The prompt methods have the rates of PEFT's examples."""
FORWARD_ONLY = {TuneMethod.ZO, TuneMethod.ES}
SPREADS = {TuneMethod.ZO: 1e-2, TuneMethod.ES: 6e-2}
"""Default distances of candidates. MeZO has 1e-2 for LoRA. With less for `es`, most candidates give
the same greedy answers. With more, all answers are bad."""
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
    - ``population``, ``spread``: candidates of a step and their distance, with forward passes only.
    - ``max_tokens``: longest answer that is rated.
    - ``reward``: SHA-256 of the file that rates answers.
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
    population: int = 8
    spread: float = 0.0
    max_tokens: int = 64
    reward: str = ""

    @property
    def prefix_length(self) -> int:
        """Positions in front of every row."""
        return self.virtual_tokens if self.method in _PROMPTS else 0

    def to_json(self) -> dict[str, Any]:
        """Return the settings that the method uses."""
        fields = asdict(self) | {"method": str(self.method), "target_modules": list(self.target_modules)}
        unused = {"rank", "alpha", "target_modules"} if self.method in _PROMPTS else {"virtual_tokens"}
        if self.method not in FORWARD_ONLY:
            unused |= {"population", "spread", "max_tokens", "reward"}
        return {name: value for name, value in fields.items() if name not in unused}


def attach(model: Any, name: str, settings: TuneSettings) -> Any:
    """Return a PEFT model around ``model``, called ``name``. The seed determines its initial
    parameters.

    Raises ``ConfigError`` for settings that do not fit the model.
    """
    import torch

    if settings.method == TuneMethod.CLASSIFIER:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            model.score.reset_parameters()
    try:
        tuned = peft_adapters.attach(model, name, _config(settings), seed=settings.seed)
    except ValueError as error:
        raise ConfigError(f"PEFT: {error}", hint=f"--target-modules: {linear_names(model)}") from error
    if settings.method in FORWARD_ONLY:
        for path, parameter in tuned.named_parameters():
            if "lora_A" in path:
                parameter.requires_grad_(False)
    return tuned


def _config(settings: TuneSettings) -> Any:
    import peft

    match settings.method:
        case TuneMethod.PROMPT:
            return peft.PromptTuningConfig(
                task_type=peft.TaskType.CAUSAL_LM,
                num_virtual_tokens=settings.virtual_tokens,
                prompt_tuning_init=peft.PromptTuningInit.SAMPLE_VOCAB,
            )
        case TuneMethod.DEEP_PROMPT:
            return peft.PrefixTuningConfig(
                task_type=peft.TaskType.CAUSAL_LM, num_virtual_tokens=settings.virtual_tokens
            )
        case _:
            return lora_config(
                rank=settings.rank,
                alpha=settings.alpha,
                targets=settings.target_modules,
                task="SEQ_CLS" if settings.method == TuneMethod.CLASSIFIER else "CAUSAL_LM",
            )
