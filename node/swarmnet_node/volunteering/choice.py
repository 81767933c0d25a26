"""Decide whether a volunteer hosts blocks or trains a job. Pure.

Each model and job of the swarm has an urgency, as if this machine were not there:

- ``STOPPED``: nobody can use it. Blocks have no host, or rounds lack one worker.
- ``THIN``: one failure would stop it, hosts are overloaded, or rounds lack several workers.
- ``FASTER``: another worker makes the job faster.
- ``SPARE``: the hosts of the model suffice.

The most urgent work comes first. Between equals, a machine with a GPU trains, and another hosts. A
volunteer leaves its work only for more urgent work, which it has seen at ``CONFIRM_LOOKS`` looks in
a row, and at most once in ``PAUSE_S``. Volunteers draw lots, so that not all switch at once. A
volunteer leaves work that is over, such as a job that is done, at once.
"""

import json
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError

if TYPE_CHECKING:
    from swarmnet_protocols.training.open_jobs import OpenJob

HOST, TRAIN = "host", "train"
PAUSE_S = 3600.0
"""Seconds after a switch until a volunteer may switch again. With less, it spends its time on
loading models. With more, work waits longer for it."""
CONFIRM_LOOKS = 4
"""Looks in a row that must show the same need. With fewer, a host that is restarted seems lost.
With more, a job waits longer for its first worker."""
RETRY_S = 6 * 3600.0
"""Seconds until a volunteer tries work again that failed here, such as a job that does not fit."""
OVERLOADED = 0.75
"""Load of a model's hosts from which it needs more (``model_needs.OVERLOADED``)."""
MAX_FAILED = 64
"""Most failures that a volunteer remembers. With more, a swarm of many jobs fills its file. With
fewer, it tries work again that has just failed."""


class NeedLevel(IntEnum):
    """The urgency of some work, for a volunteer."""

    SPARE = 0
    FASTER = 1
    THIN = 2
    STOPPED = 3


@dataclass(frozen=True)
class Duty:
    """Hosting the model ``name``, or training the job with the id ``name``."""

    role: str
    name: str


@dataclass(frozen=True)
class SeenModel:
    """A model and its hosts, without this machine."""

    name: str
    blocks: int
    """0 if unknown, because nobody hosts it."""
    missing: int
    """Blocks without a host."""
    thin: int
    """Blocks with one host."""
    hosts: int
    load: float = 0.0
    """Median load of the hosts."""
    is_wanted: bool = True
    """True if a host announces the model, or the swarm file lists it."""


@dataclass(frozen=True)
class Seen:
    """The swarm, as a volunteer sees it at one time, without this machine."""

    models: Sequence[SeenModel] = ()
    jobs: Sequence["OpenJob"] = ()


@dataclass(frozen=True)
class Offer:
    """The machine that a volunteer offers."""

    memory_bytes: float = math.inf
    has_gpu: bool = False


LEAST_JOB_BYTES = 600 << 20
"""Memory of the smallest worker: torch and transformers. A machine that offers less hosts."""


@dataclass(frozen=True)
class Suggestion:
    """Work that the swarm needs. ``reason`` is for the owner of the machine."""

    work: Duty
    urgency: NeedLevel
    reason: str
    chance: float = 1.0
    """Probability with which each volunteer that may take this work does so at one look."""


@dataclass(frozen=True)
class VolunteerMemory:
    """The memory of a volunteer between two looks and two starts. Times are Unix times."""

    work: Duty | None = None
    """The work of this machine. None until it has chosen."""
    reason: str = ""
    switched_at: float = -math.inf
    wanted: Duty | None = None
    """More urgent work, which the last ``looks`` looks have shown."""
    looks: int = 0
    failed_at: Mapping[Duty, float] = field(default_factory=dict)

    def after_failure(self, work: Duty, now: float) -> "VolunteerMemory":
        """Return the memory after ``work`` could not be done here."""
        failed = {**self.failed_at, work: now}
        return replace(self, work=None, failed_at=dict([*failed.items()][-MAX_FAILED:]))

    def at_start(self, now: float) -> "VolunteerMemory":
        """Return the memory for a new start of the command.

        The volunteer chooses anew, unless it switched within ``PAUSE_S``.
        """
        return self if now < self.switched_at + PAUSE_S else replace(self, work=None)

    def to_json(self) -> str:
        fields = {"work": _plain(self.work), "reason": self.reason}
        if self.switched_at > -math.inf:
            fields["switched_at"] = self.switched_at
        failed = [[*_plain(work), at] for work, at in self.failed_at.items()]
        return json.dumps(fields | {"failed": failed})

    @classmethod
    def from_json(cls, text: str) -> "VolunteerMemory":
        """Read the text of ``to_json``. Raises ``ConfigError`` for other text."""
        try:
            found: Any = json.loads(text)
            work = None if found["work"] is None else Duty(*map(str, found["work"]))
            failed = {Duty(str(role), str(name)): float(at) for role, name, at in found["failed"]}
            return cls(
                work, str(found["reason"]), float(found.get("switched_at", -math.inf)), failed_at=failed
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError("this is not a volunteer's memory") from error


def _plain(work: Duty | None) -> Any:
    return None if work is None else [work.role, work.name]


def decide(
    seen: Seen, offer: Offer, memory: VolunteerMemory, *, now: float, rng: random.Random
) -> tuple[Suggestion | None, VolunteerMemory]:
    """Return the work to begin now, and the memory for the next look.

    None: go on with ``memory.work``, or wait if it is None and the swarm needs nothing.
    """
    tried = {work for work, at in memory.failed_at.items() if now < at + RETRY_S}
    found = choices(seen, offer, refused=tried)
    doing = memory.work
    present = next((each for each in found if each.work == doing), None)
    if doing is not None and doing.role == HOST:
        # The node itself moves to other models of the swarm.
        hosting = [each for each in found if each.work.role == HOST]
        present = present or next(iter(hosting), None)
        found = [each for each in found if each.work.role == TRAIN]
    if doing is None or is_over(seen, doing):
        best = next(iter(found), None)
        if best is None:
            return None, replace(memory, work=None, wanted=None, looks=0)
        return best, replace(memory, work=best.work, reason=best.reason, wanted=None, looks=0)
    least = NeedLevel.SPARE if present is None else present.urgency
    best = next((each for each in found if each.urgency > least), None)
    if best is None:
        return None, replace(memory, wanted=None, looks=0)
    looks = memory.looks + 1 if best.work == memory.wanted else 1
    memory = replace(memory, wanted=best.work, looks=looks)
    if looks < CONFIRM_LOOKS or now < memory.switched_at + PAUSE_S or rng.random() >= best.chance:
        return None, memory
    after = replace(memory, work=best.work, reason=best.reason, switched_at=now, wanted=None, looks=0)
    return best, after


def is_over(seen: Seen, work: Duty) -> bool:
    """Return whether ``work`` no longer needs this machine.

    A job that is not seen may go on: the directory of a peer that has just started is empty.
    """
    return work.role == TRAIN and any(
        job.outline.id == work.name and (job.is_done or job.is_full) for job in seen.jobs
    )


def choices(seen: Seen, offer: Offer, *, refused: Collection[Duty] = ()) -> list[Suggestion]:
    """Return all work that this machine may do, what the swarm needs most first."""
    hosts = sum(model.hosts for model in seen.models)
    workers = sum(len(job.workers) for job in seen.jobs)
    found = [_hosting(model, workers) for model in seen.models]
    if offer.memory_bytes >= LEAST_JOB_BYTES:
        found += [
            _training(job, hosts)
            for job in seen.jobs
            if not (job.outline.needs_user or job.is_done or job.is_full)
        ]
    first = TRAIN if offer.has_gpu else HOST
    return sorted(
        (each for each in found if each.work not in refused),
        key=lambda each: (-each.urgency, each.work.role != first, each.work.name),
    )


def _hosting(model: SeenModel, workers: int) -> Suggestion:
    work, chance = Duty(HOST, model.name), 1 / (workers + 1)
    if model.missing and model.is_wanted:
        which = f"{model.missing} of its {model.blocks}" if model.missing < model.blocks else "its"
        return Suggestion(work, NeedLevel.STOPPED, f"no host has {which} blocks", chance)
    if model.missing:
        return Suggestion(work, NeedLevel.SPARE, "the swarm asks for nothing else", chance)
    if model.thin:
        reason = f"{model.thin} of its {model.blocks} blocks have one host only"
        return Suggestion(work, NeedLevel.THIN, reason, chance)
    if model.load >= OVERLOADED:
        return Suggestion(work, NeedLevel.THIN, f"its hosts compute {model.load:.0%} of the time", chance)
    return Suggestion(work, NeedLevel.SPARE, "the swarm needs nothing more urgently", chance)


def _training(job: "OpenJob", hosts: int) -> Suggestion:
    about, workers = job.outline, len(job.workers)
    work, lacking = Duty(TRAIN, about.id), about.least - workers
    chance = min(1.0, max(1, lacking) / (hosts + 1))
    if lacking > 1:
        return Suggestion(work, NeedLevel.THIN, f"{about.name}: its rounds lack {lacking} workers", chance)
    if lacking == 1:
        who = "its rounds lack one worker" if workers else "nobody trains it"
        return Suggestion(work, NeedLevel.STOPPED, f"{about.name}: {who}", chance)
    why = f"{about.name}: {workers} of at most {about.most} workers train it"
    return Suggestion(work, NeedLevel.FASTER, why, chance)
