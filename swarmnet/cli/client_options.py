"""The options that all clients share: how a client enters a swarm, and where its files are."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    HostsOption,
    MaxDiskOption,
    TransportOption,
)
from swarmnet_protocols.errors import ConfigError, Unreachable

if TYPE_CHECKING:
    from swarmnet_protocols.joining.network import Network
    from swarmnet_protocols.models import LocalModel, Progress


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How a client enters a swarm, and where its files are."""

    transport: TransportOption = "auto"
    bootstrap: BootstrapOption = field(default_factory=list)
    hosts: HostsOption
    data_dir: DataDirOption
    cache_dir: CacheDirOption
    max_disk_bytes: MaxDiskOption

    def resolve(self, name: str, network: "Network", report: "Progress") -> "LocalModel":
        """Return a model of the swarm, or the newest revision of a training job.

        A job has a name, an id, or the job file from which this machine made it. Raises as
        ``resolve_in_swarm``, and ``Unreachable`` for a job that nobody serves.
        """
        from swarmnet_protocols.joining.without_hub import resolve_in_swarm
        from swarmnet_protocols.machine import lean_imports
        from swarmnet_protocols.models.public_names import is_path

        lean_imports.use()
        if name.endswith(".toml"):
            from swarmnet.cli.training.job_names import job_here

            name = job_here(name, self.data_dir)
        try:
            return resolve_in_swarm(
                name,
                lambda: network,
                cache_dir=self.cache_dir,
                progress=report,
                max_disk_bytes=self.max_disk_bytes,
            )
        except ConfigError as error:
            if is_path(name) or not asyncio.run(_is_job(name, network)):
                raise
            raise Unreachable(
                f"no machine serves the job {name!r} yet",
                hint=f"on any machine with room for its model: swarmnet join SWARM --job {name}",
            ) from error

    def network(self, swarm: str) -> "Network":
        """Return the client's connection to ``swarm``. Raises the errors of ``client_network``."""
        from swarmnet.swarm_file.entry import client_network

        return client_network(swarm, self.bootstrap, self.data_dir, self.hosts)


async def _is_job(name: str, network: "Network") -> bool:
    from swarmnet.cli.training.job_names import job_in_swarm
    from swarmnet_protocols.joining.network import connect

    with suppress(ConfigError, Unreachable):
        async with connect(network, client_mode=True) as (_, directory):
            await job_in_swarm(name, directory)
            return True
    return False
