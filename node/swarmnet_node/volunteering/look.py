"""Reads the models and jobs of the swarm, without this machine, for a volunteer's decision."""

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median

from swarmnet_node.volunteering.choice import Seen, SeenModel
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.catalog import CatalogModel, read_catalog
from swarmnet_protocols.directory.host_announcements import read_hosts
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.models.public_names import name_for_peers
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.open_jobs import JobOutline, read_open_jobs


@dataclass
class Looker:
    """Looks at the swarm of ``directory`` for the machine ``me``."""

    directory: Directory
    me: PeerId
    rules: Rules
    fallback: str
    """The model that this machine hosts if nobody asks for another."""
    _jobs: dict[str, JobOutline] = field(default_factory=dict)

    async def look(self) -> Seen:
        """Read the directory. Raises ``SwarmnetError`` if it does not answer."""
        announced = {model.manifest: model for model in (await read_catalog(self.directory)).models}
        names = {manifest: name for name, manifest in self.rules.names.items()}
        models = [
            await self._model(model, names.get(manifest) or self._name(model))
            for manifest, model in announced.items()
        ]
        models += [_unhosted(name) for manifest, name in names.items() if manifest not in announced]
        if not models:
            models.append(_unhosted(self.fallback, is_wanted=False))
        jobs = await read_open_jobs(self.directory, self._jobs)
        return Seen(models, [replace(job, workers=job.workers - {self.me}) for job in jobs])

    def _name(self, model: CatalogModel) -> str:
        """Return the name under which this machine finds a model. Others see names without
        paths."""
        return self.fallback if name_for_peers(self.fallback) == model.name else model.name

    async def _model(self, model: CatalogModel, name: str) -> SeenModel:
        hosts = [host for host in await read_hosts(self.directory, model.manifest) if host.peer != self.me]
        held = Counter(block for host in hosts for block in range(host.start, min(host.end, model.blocks)))
        missing = sum(not held[block] for block in range(model.blocks))
        thin = sum(held[block] == 1 for block in range(model.blocks))
        load = median([host.load for host in hosts] or [0.0])
        return SeenModel(name, model.blocks, missing, thin, len(hosts), load)


def _unhosted(name: str, *, is_wanted: bool = True) -> SeenModel:
    return SeenModel(name, 0, missing=1, thin=0, hosts=0, is_wanted=is_wanted)
