"""``swarmnet join --job``: a host of the newest revision of a training job.

1. ``model`` picks the revision: the newest that other hosts announce, or the present state of the
   workers, which it collects into a folder. So hosts of parts of the model agree on a revision.
2. The node hosts it like any model. Sessions stay on the revision with which they began.
3. After ``refresh_s``, and when a newer revision exists, the node ends as soon as it has no
   session. The command then begins at 1 again, unless the owner has stopped the node meanwhile.
"""

import asyncio
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.cli.output import note, progress
from swarmnet.cli.training.job_names import fetch_named, find_here
from swarmnet.cli.training.train_results import collect_model
from swarmnet.swarm_file.entry import Entry
from swarmnet_protocols.directory.revisions import LOOK_S
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.joining.network import client_listen, connect
from swarmnet_protocols.machine.lean_imports import import_transformers

if TYPE_CHECKING:
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import Progress

IDLE_WAIT_S = 600.0
"""Seconds that a host waits for a moment without a session. After that, it refuses new sessions
until the last one has ended. With less, clients are refused sooner. With more, a busy host stays on
an old revision."""


class ServedJob:
    """The revisions of one job that this machine hosts, one after another."""

    def __init__(self, entry: Entry, job: str, data_dir: Path, cache_dir: Path, refresh_s: float) -> None:
        self._network = entry.network(client_listen(entry.addresses))
        self._job = job
        self._data_dir = data_dir
        self._cache_dir = cache_dir
        self._refresh_s = refresh_s
        self._model = ""
        """The model that is hosted: the folder of a revision, or its announced name."""
        self._rounds = -1
        """Committed rounds of the model."""
        self._collected_at = -1
        """The workers' round when the model was chosen."""
        self.is_outdated = False
        """True if a newer revision ended the last node, and not its owner."""

    def model(self, *, as_json: bool) -> str:
        """Return the model to host now: a path, or the name that other hosts announce.

        Raises ``Unreachable`` if neither hosts nor workers of the job answer.
        """
        self.is_outdated = False
        with progress(quiet=as_json) as report:
            report("looking for the job", 0, None)
            import_transformers()
            try:
                self._choose(report)
            except SwarmnetError as error:
                if not self._model:
                    raise
                note(f"no newer revision, because {error}")
        return self._model

    async def end_when_outdated(self, node: "Supervisor") -> None:
        """End ``node`` when it has served for ``refresh_s``, is outdated, and has no session."""
        await asyncio.sleep(self._refresh_s)
        while not await self._has_newer(node.dependencies.directory):  # noqa: ASYNC110 - in the swarm
            await asyncio.sleep(LOOK_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_WAIT_S):
                while node.host is not None and node.host.sessions:  # noqa: ASYNC110 - no event of it
                    await asyncio.sleep(1.0)
        if node.grace_s is not None:  # its owner stops it
            return
        node.finish(math.inf)  # the remaining sessions stay until they end
        try:
            await node.finished()
        finally:
            self.is_outdated = node.grace_s == math.inf

    def _choose(self, report: "Progress") -> None:
        job = asyncio.run(
            fetch_named(self._network, self._data_dir, self._job, find_here(self._job, self._data_dir))
        )
        announced, self._collected_at = asyncio.run(self._look(job))
        if announced is not None:
            self._model, self._rounds = announced
            return
        from swarmnet_node.training.job_store import load_stored_job
        from swarmnet_protocols.directory.revisions import revision_name

        sealed, _ = load_stored_job(self._data_dir, job)
        if sealed.job.model.is_lora:
            raise ConfigError(
                "this job trains an adapter, which hosts get from the client",
                hint="`swarmnet train export --out DIR`, then `swarmnet run MODEL --adapter DIR`",
            )
        folder = self._data_dir / "training" / job / "revisions"
        shutil.rmtree(folder, ignore_errors=True)
        _, revisions = collect_model(
            self._network, self._data_dir, job, folder / "new", self._cache_dir, report
        )
        self._rounds = min(revisions)
        path = folder / revision_name(sealed.job.job.name, job, self._rounds)
        (folder / "new").rename(path)
        self._model = str(path)

    async def _look(self, job: str) -> tuple[tuple[str, int] | None, int]:
        """Return the newest revision that hosts announce, if it is newer than the present one, and
        the workers' round."""
        async with connect(self._network, client_mode=True) as (_, directory):
            return await self._announced(directory, job), await _round_of(directory, self._data_dir, job)

    async def _announced(self, directory: "Directory", job: str) -> tuple[str, int] | None:
        from swarmnet_protocols.directory.revisions import hosted_revision, rounds_of

        found = await hosted_revision(directory, job, after=self._rounds, partly=True)
        return None if found is None else (found.name, rounds_of(found.name))

    async def _has_newer(self, directory: "Directory") -> bool:
        """Return whether hosts announce a newer revision, or the workers have gone on."""
        with suppress(SwarmnetError):
            job = find_here(self._job, self._data_dir) or self._job
            if await self._announced(directory, job) is not None:
                return True
            return await _round_of(directory, self._data_dir, job) > self._collected_at
        return False


async def _round_of(directory: "Directory", data_dir: Path, job: str) -> int:
    """Return the round that all stages of a job have reached, or -1 without workers."""
    from swarmnet_node.training.job_store import load_stored_job
    from swarmnet_protocols.training.job_records import find_workers
    from swarmnet_protocols.training.pipeline.stages import groups

    sealed, _ = load_stored_job(data_dir, job)
    rounds = []
    for group in groups(job, sealed.job.stage_count):
        positions = (await find_workers(directory, group)).values()
        rounds.append(max((each.round for each in positions), default=-1))
    return min(rounds)
