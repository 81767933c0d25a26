"""The router of models: predicts which model answers a question best, and chooses one for ``auto``.

1. ``swarmnet router fit`` learns a router from comparisons (``fitting.py``) and writes its file.
2. ``swarmnet serve --router FILE`` reads the file.
3. :meth:`Router.choose` names the model of each request for ``auto``.

The quality of model m for a question q is linear in its features: ``weights[m] · features(q)``. The
difference of two qualities is the log-odds with which one answer is preferred to the other
(Bradley and Terry 1952; RouteLLM, Ong et al. 2024). The choice weighs quality against cost as
CARROT does (Somerstep et al. 2025).
"""

import json
import math
import re
from binascii import crc32
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from swarmnet.gateway.errors import RETRY_S, ApiError
from swarmnet.gateway.generation.requests import ChatPrompt, Prompt
from swarmnet_client.hosts.model_offers import ModelOffer
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import write_whole

AUTO = "auto"
"""The model whose requests the router gives to other models."""
BUCKETS = 1 << 11
"""Weights for words and pieces of words. With fewer, more of them share a weight by chance. With
more, fitting takes more memory."""
SCALARS = 4
FEATURES = BUCKETS + SCALARS
MAX_CHARS = 4096
"""Most characters of a question that count: one half from its beginning, the other from its end.
Hashing them takes about a millisecond of the event loop."""
PIECE = 4
"""Characters of a piece of a word. Pieces tell languages and endings apart, as words do not."""
MAX_MODELS = 64
MAX_NAME_CHARS = 256
MAX_FILE_BYTES = 1 << 20
"""Longest router file: more than the weights of ``MAX_MODELS`` models take."""
_FORMAT = "swarmnet-router-1"
_HINT = "make one: swarmnet router fit COMPARISONS.jsonl --out FILE"
_WORD = re.compile(r"\w+|[^\w\s]")


def question(prompt: Prompt) -> str:
    """Return the last text of a user: the last user message of a chat, or the last prompt.

    It is empty if there is none, and for prompts of tokens: models have different tokens.
    """
    if isinstance(prompt, ChatPrompt):
        return next((each.text for each in reversed(prompt.messages) if each.role == "user"), "")
    return next((each for each in reversed(prompt) if isinstance(each, str)), "")


def features(text: str) -> Array:
    """Return what the router knows of a question: float32 [FEATURES].

    Words, pairs of words, and pieces of words are hashed to signed buckets, whose norm is 1. A
    constant, the length, a code fence and the share of digits follow.
    """
    length = len(text)
    if length > MAX_CHARS:
        text = text[: MAX_CHARS // 2] + text[-MAX_CHARS // 2 :]
    lowered = text.lower()
    words = _WORD.findall(lowered)
    grams = {*words, *map(" ".join, pairwise(words))}
    grams.update(f"\n{lowered[at : at + PIECE]}" for at in range(len(lowered) - PIECE + 1))
    found = np.zeros(FEATURES, np.float32)
    if grams:
        hashes = np.array([crc32(each.encode(errors="replace")) for each in grams])
        np.add.at(found, hashes % BUCKETS, np.where(hashes >> 31, 1, -1))
        found /= max(1.0, float(np.linalg.norm(found)))
    digits = sum(map(str.isdigit, text)) / max(1, len(text))
    found[BUCKETS:] = 1, math.log1p(length) / 8, "```" in text, digits
    return found


def relative_costs(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a token of each model, divided by those of the slowest model.

    ``speeds``: tokens per second by name; 0 if unknown. An unknown speed counts as the slowest.
    """
    slowest = min((speed for speed in speeds.values() if speed > 0), default=1.0)
    return {name: slowest / (speed or slowest) for name, speed in speeds.items()}


@dataclass(frozen=True)
class Router:
    """Chooses among the models ``names``.

    - ``weights``: a row of weights for each model: float32 [models, FEATURES].
    - ``price``: what an answer of the slowest model costs, in log-odds of being preferred. With 0,
      the best model answers.
    """

    names: tuple[str, ...]
    weights: Array
    price: float = 0.0

    @classmethod
    def read(cls, path: Path, price: float = 0.0) -> "Router":
        """Read a router's file. Raises ``ConfigError`` unless it is one."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise _no_router(path, f"it has more than {MAX_FILE_BYTES} bytes")
            with safe_open(path, framework="np") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT:
                    raise _no_router(path, f"its format is not {_FORMAT}")
                names = json.loads(about.get("models", ""))
                weights = file.get_tensor("weights")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from error
        except (SafetensorError, ValueError, RecursionError, TypeError) as error:
            raise _no_router(path, "it is no safetensors file of weights") from error
        if not _are_names(names):
            raise _no_router(path, f"it does not name 2 to {MAX_MODELS} different models")
        if weights.dtype != np.float32 or weights.shape != (len(names), FEATURES):
            raise _no_router(path, f"its weights are not float32 of [{len(names)}, {FEATURES}]")
        if not np.isfinite(weights).all():
            raise _no_router(path, "its weights are not finite")
        return cls(tuple(names), weights, price)

    def write(self, path: Path) -> None:
        """Replace a file by the router. Raises ``OSError``."""
        about = {"format": _FORMAT, "models": json.dumps(self.names)}
        write_whole(path, save({"weights": self.weights.astype(np.float32)}, about), mode=0o644)

    def qualities(self, text: str) -> dict[str, float]:
        """Return the predicted quality of each model's answer to a question, in log-odds."""
        return dict(zip(self.names, (self.weights @ features(text)).tolist(), strict=True))

    def speeds(self, offers: Iterable[ModelOffer]) -> dict[str, float]:
        """Return the models of this router that can answer now, with their tokens per second."""
        return {
            each.name: each.tokens_per_s for each in offers if each.name in self.names and not each.missing
        }

    def offer(self, offers: Iterable[ModelOffer]) -> ModelOffer | None:
        """Return ``auto`` as lists of models show it; its context is that of every model. None if
        no model can answer now."""
        usable = [each for each in offers if self.speeds([each])]
        contexts = [each.context for each in usable if each.context]
        return ModelOffer(AUTO, b"", 0, min(contexts, default=0)) if usable else None

    def choose(self, text: str, speeds: Mapping[str, float], before: str = "") -> str:
        """Return the model with the highest quality after its cost.

        ``speeds``: the models that can answer now. ``before``: the model that has the beginning of
        the conversation in its caches; "" if none has. Raises ``ApiError`` if no model can answer.
        """
        if before in speeds:
            return before
        if not speeds:
            message = f"no model of the router is available now: {', '.join(self.names)[:256]}"
            raise ApiError(503, message, "model_forming", "server_error", retry_after_s=RETRY_S)
        qualities, costs = self.qualities(text), relative_costs(speeds)
        return max(sorted(speeds), key=lambda name: qualities[name] - self.price * costs[name])


def _are_names(names: object) -> bool:
    return (
        isinstance(names, list)
        and 2 <= len(names) <= MAX_MODELS
        and all(isinstance(each, str) and 0 < len(each) <= MAX_NAME_CHARS for each in names)
        and len(set(names)) == len(names)
    )


def _no_router(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is no router: {reason}", hint=_HINT)
