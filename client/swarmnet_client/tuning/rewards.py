"""Rewards: functions in Python files of this machine's user, which rate answers."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.methods.outside import blaming, load_module

_HINT = "define reward(prompt, answer, expected) there, which returns a number; docs/tuning.md has an example"


@dataclass(frozen=True)
class Reward:
    """A function of this machine's user that rates answers. ``expected``: the row's own answer."""

    path: Path
    sha256: str
    rate: Callable[[str, str, str], float]

    @classmethod
    def load(cls, path: Path) -> "Reward":
        """Load the function ``reward`` of a Python file.

        Raises ``ConfigError`` for a file without it.
        """
        module, source = load_module(path, hint=_HINT)
        if not callable(rate := getattr(module, "reward", None)):
            raise ConfigError(f"{path} has no function reward", hint=_HINT)
        return cls(path, hashlib.sha256(source).hexdigest(), rate)

    def __call__(self, prompt: str, answer: str, expected: str) -> float:
        """Return the reward of an answer. Raises ``ConfigError`` if it is no finite number."""
        with blaming(f"reward of {self.path}", _HINT):
            rated = float(self.rate(prompt, answer, expected))
            if not math.isfinite(rated):
                raise ConfigError(f"{self.path} gave the reward {rated}", hint=_HINT)
            return rated
