"""``swarmnet volunteer``: hosts blocks or trains a job, whichever the swarm needs more."""

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.commands.join import ForegroundOptions, NodeOptions, host
from swarmnet.cli.consent import VOLUNTEERING, ask_once
from swarmnet.cli.foreground import DEFAULT_GRACE_S, idle_guest, say_pause
from swarmnet.cli.interrupts import run_until_stopped
from swarmnet.cli.limit_options import rows
from swarmnet.cli.options import MetricsOption, SwarmArgument
from swarmnet.cli.output import note, say
from swarmnet.cli.peer_options import MachineOptions
from swarmnet.paths import locked_data_dir
from swarmnet.restart import may_restart, restart, take_resting, was_restarted
from swarmnet.swarm_file.entry import Entry
from swarmnet_node.volunteering.choice import HOST, TRAIN, Duty, Offer, VolunteerMemory, decide
from swarmnet_protocols.errors import (
    ConfigError,
    IntegrityError,
    NotAuthorised,
    OutOfResources,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import persist, within
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.membership.rules import Admission

if TYPE_CHECKING:
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_node.training.start import Training
    from swarmnet_node.volunteering.look import Looker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.net import PeerId

FOLDER = "volunteer"
"""Folder in the data directory with the owner's consent and the volunteer's memory."""
MEMORY_NAME = "memory.json"
MAX_MEMORY_BYTES = 1 << 16
FIRST_LOOKS = 3
"""Looks at a swarm that seems empty before the volunteer believes it. Peers of the local network
take a second to appear."""
_UNFIT = (ConfigError, IntegrityError, NotAuthorised, OutOfResources, Unreachable)
"""Errors after which the volunteer tries other work."""


def volunteer(
    swarm: SwarmArgument,
    *,
    options: NodeOptions,
    foreground: ForegroundOptions,
    metrics: MetricsOption = None,
    look_every_s: Annotated[float, typer.Option("--look-every", hidden=True, min=0.1)] = 60.0,
) -> None:
    """Host blocks or train a job of the swarm, whichever it needs more, until `swarmnet finish` or
    Ctrl-C.

    It looks at the swarm every minute, and changes its work at most once an hour. `--model` is
    hosted if nobody asks for another. The limits hold for both. `swarmnet status` says what it does
    and why.

    \b
    Examples:
      swarmnet volunteer lab
      swarmnet volunteer invite.txt --preset laptop
      swarmnet volunteer lab --schedule "mon-fri 19:00-07:00" --max-ram 8GiB
    """
    options.check()
    if not was_restarted():
        say({"event": "looking"}, "looks for what the swarm needs most", as_json=foreground.as_json)
    entry = options.machine.enter(swarm)
    Volunteer(entry, options, foreground, metrics, look_every_s).run()


@dataclass
class Volunteer:
    """The command while it runs: one role at a time."""

    entry: Entry
    options: NodeOptions
    foreground: ForegroundOptions
    metrics: tuple[str, int] | None
    look_every_s: float
    memory: VolunteerMemory = field(default_factory=VolunteerMemory)
    _rng: random.Random = field(default_factory=random.Random)
    _is_switching: bool = False
    _is_stopped: bool = False
    """True if the owner stopped the command."""

    @property
    def machine(self) -> MachineOptions:
        return self.options.machine

    def run(self) -> None:
        """Work until the owner stops the command."""
        with locked_data_dir(self.machine.data_dir) as directory:
            self._ask(directory)
            self._load()
        while not self._is_stopped:
            if self.memory.work is None:
                with locked_data_dir(self.machine.data_dir):
                    run_until_stopped(self._choose())
            if self.memory.work is not None:
                self._work(self.memory.work)

    def _work(self, work: Duty) -> None:
        """Do ``work`` until it is over, the owner stops it, or the swarm needs other work more."""
        self._is_switching = False
        hosts = work.role == HOST
        text = f"hosts {work.name}" if hosts else f"trains the job {work.name[:8]}"
        self._say(
            "volunteer",
            f"{text}: {self.memory.reason}",
            role=work.role,
            name=work.name,
            reason=self.memory.reason,
        )
        try:
            is_over = self._host(work.name) if hosts else self._train(work.name)
        except _UNFIT as error:
            note(f"this volunteer {text} no longer, and looks for other work: {error}")
            self.memory = self.memory.after_failure(work, wall_clock())
            is_over = False
        if is_over:
            self.memory = replace(self.memory, work=None)
        self._save()
        if not self._is_stopped and may_restart():
            restart()

    def _host(self, model: str) -> bool:
        options, foreground = replace(self.options, model=model), replace(self.foreground, yes=True)
        host(self.entry, options, foreground, metrics=self.metrics, companion=self._node_companion)
        self._is_stopped = not self._is_switching
        return False

    def _train(self, job: str) -> bool:
        """Train ``job``. Return whether its last round is done."""
        from swarmnet.cli.training.join import WorkerOptions, configured, rest, train

        take_resting()
        device, as_json = self.options.device.partition(",")[0], self.foreground.as_json
        options = WorkerOptions(machine=self.machine, device=device, metrics=self.metrics, as_json=as_json)
        with locked_data_dir(self.machine.data_dir):
            if not run_until_stopped(rest(self.entry, options)):
                self._is_stopped = True
                return False
            config = configured(self.entry, options, job)
            config = replace(config, volunteers=self.memory.reason)
            paused = train(config, options, companion=self._worker_companion)
        return not paused and not self._is_stopped

    async def _node_companion(self, node: "Supervisor") -> None:
        node.volunteers = self.memory.reason
        dependencies = node.dependencies
        looker = self._looker(dependencies.directory, dependencies.transport.peer_id)
        await self._until_switch(looker, lambda: node.is_online)
        node.finish(DEFAULT_GRACE_S)

    async def _worker_companion(self, training: "Training") -> None:
        peer = training.peer
        looker = self._looker(training.directory, training.transport.peer_id)
        try:
            await self._until_switch(looker, lambda: peer.is_working)
            training.leave()
        finally:
            self._is_stopped = peer.stopping.is_set() and not self._is_switching

    async def _until_switch(self, looker: "Looker", is_working: Callable[[], bool]) -> None:
        while not await persist("the look", partial(self._must_switch, looker, is_working)):
            pass

    async def _must_switch(self, looker: "Looker", is_working: Callable[[], bool]) -> bool:
        """Look once, after a while. Return whether the swarm needs other work more."""
        await asyncio.sleep(self.look_every_s * self._rng.uniform(0.8, 1.2))
        if not is_working() or not await self._decide(looker):
            return False
        self._is_switching = True
        self._save()
        self._say("switching", f"changes its work: {self.memory.reason}", reason=self.memory.reason)
        return True

    async def _decide(self, looker: "Looker") -> bool:
        """Look, and return whether ``memory.work`` is new. A job is stored here before the work
        begins, because the next program may find no peer that has it."""
        with suppress(SwarmnetError):  # the directory may answer at the next look
            seen, now = await looker.look(), wall_clock()
            choice, memory = decide(seen, self._offer(), self.memory, now=now, rng=self._rng)
            if choice is not None and choice.work.role == TRAIN:
                from swarmnet_node.training.job_store import fetch_job

                await fetch_job(self.machine.data_dir, looker.directory, choice.work.name)
            self.memory = memory
            return choice is not None
        return False

    async def _choose(self) -> None:
        """Wait, with an idle peer, until there is work or the owner stops the command."""
        from swarmnet_node.owner.watched_peer import Purpose

        file, folder, limits = self.entry.file, self.machine.data_dir, self.machine.owner_limits()
        network = self.machine.network(self.entry)
        purpose = Purpose("volunteer", file.name, folder, network.peer.link, limits=limits)
        async with idle_guest(network, purpose) as (peer, transport, records):
            looker, looks = self._looker(records, transport.peer_id), 0
            while await peer.may_work(lambda _: say_pause(peer.status(), as_json=self.foreground.as_json)):
                looks += 1
                is_alone = not peer.status().known_peers and bool(self.entry.addresses or file.mdns)
                if not (is_alone and looks < FIRST_LOOKS) and await self._decide(looker):
                    return
                if looks == FIRST_LOOKS:
                    self._say("idle", "the swarm needs nothing that this machine can do; looks again")
                await within(1.0 if looks < FIRST_LOOKS else self.look_every_s, peer.stopping.wait())
            self._is_stopped = True

    def _looker(self, directory: "Directory", me: "PeerId") -> "Looker":
        from swarmnet_node.volunteering.look import Looker

        return Looker(directory, me, self.entry.file.rules(), self.options.model)

    def _offer(self) -> Offer:
        from swarmnet_node.owner.machine import load_limits

        limits, device = load_limits(self.machine.data_dir), self.options.device
        has_gpu = device.startswith(("cuda", "mps")) or (device == "auto" and Path("/dev/nvidia0").exists())
        return Offer(limits.max_ram_bytes or math.inf, has_gpu)

    def _ask(self, directory: Path) -> None:
        is_open = self.entry.file.admission is Admission.OPEN
        peers = "every peer that has the swarm file" if is_open else "members of the swarm"
        facts = rows(self.machine.owner_limits()) | {
            "hosts": f"blocks of a model that the swarm lacks; used by {peers}",
            "trains": f"jobs that {peers} may have written: on data that a job names, never on your files, and without code of its author",
            "sends": "what blocks compute, and changes of a job's weights",
            "disk": f"models in {self.machine.cache_dir}, checkpoints in {directory / 'training'}",
            "others see": "this machine's IP address, its peer id, and what it hosts or trains"
            + (f", and the name {self.machine.public_name}" if self.machine.public_name else ""),
        }
        asking, as_json = not self.foreground.yes, self.foreground.as_json
        ask_once(directory / FOLDER, facts, VOLUNTEERING, asking=asking, as_json=as_json)

    def _load(self) -> None:
        """Load the memory. A damaged one counts as none: the volunteer then chooses anew."""
        with suppress(OSError, ConfigError), self._memory_path.open(errors="replace") as file:
            memory = VolunteerMemory.from_json(file.read(MAX_MEMORY_BYTES))
            self.memory = memory if was_restarted() else memory.at_start(wall_clock())

    def _save(self) -> None:
        with suppress(OSError):  # the next program chooses anew
            write_whole(self._memory_path, self.memory.to_json().encode())

    @property
    def _memory_path(self) -> Path:
        return self.machine.data_dir / FOLDER / MEMORY_NAME

    def _say(self, event: str, text: str, **values: object) -> None:
        say({"event": event} | values, text, as_json=self.foreground.as_json)
