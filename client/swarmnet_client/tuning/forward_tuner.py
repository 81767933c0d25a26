"""Fine-tuning with forward passes only: zeroth order on losses, or evolution on rewards.

Each step tries pairs of candidates, the adapter plus and minus ``spread`` times a direction of
random signs, and moves along all directions.

- ``zo``: the slope of the loss along a direction, (L₊ - L₋) / 2ε, is the length of the move (MeZO,
  arXiv 2305.17333, algorithm 2).
- ``es``: rewards of answers, normalised over all candidates, decide instead (evolution strategies
  with mirrored samples, arXiv 1703.03864).

As in ESSA (arXiv 2507.04453), few numbers change: LoRA's second matrices, while the first ones stay
as they were drawn.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch

from swarmnet_client.model.client_adapter import adapter_of
from swarmnet_client.tuning.batches import Dataset
from swarmnet_client.tuning.candidates import answers, losses
from swarmnet_client.tuning.methods import TuneMethod, TuneSettings
from swarmnet_client.tuning.rewards import Reward
from swarmnet_client.tuning.trainer import Point, SwarmUsage, Tuner
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.text.rows import Example
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.training.shared_randomness import add_signs


class ForwardTuner(Tuner):
    """Trains the adapter of a model on a swarm. Hosts and this machine compute no gradients.

    With ``reward``, losses are 1 - the mean reward.
    """

    moments = ()

    def __init__(
        self,
        tuned: Any,
        dataset: Dataset,
        settings: TuneSettings,
        usage: Callable[[], SwarmUsage] = SwarmUsage,
        reward: Reward | None = None,
    ) -> None:
        """Raises ``ConfigError`` for a reward and rows without a prompt."""
        super().__init__(tuned, dataset, settings, usage)
        self._opened = tuned.get_base_model()
        self._reward = reward
        if reward is not None:
            for row in (*dataset.train, *dataset.held_out):
                if row.learned[0]:
                    raise ConfigError(
                        f"line {row.line}: the row has no prompt to answer",
                        hint='write rows of {"prompt", "completion"} or {"messages"}',
                    )

    @torch.no_grad()
    def _learn(self) -> dict[str, Any]:
        started, before = time.perf_counter(), self._usage()
        settings, step, pairs = self._settings, self.step, self._settings.population // 2
        rate = settings.learning_rate * self._rate_factor()
        start = torch.cat([value.flatten() for value in self._parameters.values()])
        candidates = []
        try:
            for pair in range(pairs):
                for sign in (1, -1):
                    self._set(self._moved(start, [(pair, sign * settings.spread)]))
                    candidates.append(adapter_of(self._opened))
        finally:
            self._set(start)
        scores, tokens = self._scores(candidates, step)
        if not all(map(math.isfinite, scores)):
            raise self._diverged("the loss")
        lengths = _lengths(scores, settings)
        self.is_whole = False
        self._set(self._moved(start, [(pair, -rate * length) for pair, length in enumerate(lengths)]))
        return self._stepped(fmean(scores), rate, tokens, started, before)

    def _evaluate(self) -> dict[str, Any]:
        if self._reward is None:
            return super()._evaluate()
        started, before = time.perf_counter(), self._usage()
        (loss,), _ = self._rated([adapter_of(self._opened)], self._dataset.held_out)
        self.history.append(Point(self.step, val_loss=loss))
        event = {"event": "eval", "step": self.step, "val_loss": loss}
        return event | {"seconds": time.perf_counter() - started, **self._used(before)}

    def _moved(self, start: torch.Tensor, moves: Sequence[tuple[int, float]]) -> torch.Tensor:
        """Return ``start`` moved along this step's directions: (number, by)."""
        moved = start.clone()
        for direction, by in moves:
            add_signs(moved, by, self._settings.seed, (self.step, direction))
        return moved

    def _set(self, flat: torch.Tensor) -> None:
        sizes = [value.numel() for value in self._parameters.values()]
        for value, part in zip(self._parameters.values(), torch.split_with_sizes(flat, sizes), strict=True):
            value.data.copy_(part.view(value.shape))

    def _scores(self, candidates: Sequence[Adapter], step: int) -> tuple[list[float], int]:
        """Return the losses of candidates on a step's rows, and how many tokens hosts computed."""
        if self._reward is not None:
            return self._rated(candidates, self._dataset.rows(step))
        batch = self._dataset.batch(step)
        tokens = int(batch["attention_mask"].sum()) * len(candidates)
        return losses(self._opened, batch, candidates), tokens

    def _rated(self, candidates: Sequence[Adapter], rows: Sequence[Example]) -> tuple[list[float], int]:
        """Return 1 - the mean reward of each candidate's answers, and how many tokens hosts
        computed."""
        firsts = [int(row.learned.argmax()) for row in rows]
        asked = [row.ids[:first].tolist() for row, first in zip(rows, firsts, strict=True)]
        expected = [row.ids[first:] for row, first in zip(rows, firsts, strict=True)]
        given = answers(self._opened, asked, candidates, self._settings.max_tokens)
        scores = [1 - fmean(map(self._rate, asked, each, expected)) for each in given]
        return scores, sum(len(ids) for each in given for ids in (*asked, *each))

    def _rate(self, *ids: Any) -> float:
        """Return the reward of a prompt, an answer and the expected answer, as token ids."""
        decode = self._opened.tokenizer.decode
        return (
            self._reward(*(decode(each, skip_special_tokens=True) for each in ids)) if self._reward else 0.0
        )


def _lengths(scores: Sequence[float], settings: TuneSettings) -> list[float]:
    """Return how far to move against each direction, by the losses of its two candidates."""
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    if settings.method is TuneMethod.ZO:
        return [(plus - minus) / (2 * settings.spread * len(pairs)) for plus, minus in pairs]
    deviation = pstdev(scores) or 1.0
    return [(plus - minus) / (2 * deviation * math.sqrt(len(pairs))) for plus, minus in pairs]
