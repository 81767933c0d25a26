"""The options that all clients share, and the options that nodes and workers share."""

import platform
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swarmnet.addresses import usual_listen
from swarmnet.cli.limit_options import LimitOptions, PriorityOption
from swarmnet.cli.options import (
    AnnounceOption,
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    HostsOption,
    IssuerOption,
    ListenOption,
    MaxDiskOption,
    PublicNameOption,
    TransportOption,
)
from swarmnet_protocols.errors import ConfigError, Unreachable

if TYPE_CHECKING:
    from swarmnet.swarm_file.entry import Entry
    from swarmnet_node.owner.limits import OwnerLimits
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.joining.network import Network
    from swarmnet_protocols.models import LocalModel, Progress


MAX_LISTED = 10
"""Most models in the hint that a name is unknown."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """A client's way into a swarm, and the folders of its files."""

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

        lean_imports.use()
        if name.endswith(".toml"):
            from swarmnet.cli.training.job_names import job_here

            name = job_here(name, self.data_dir)
        return resolve_in_swarm(
            name,
            lambda: network,
            cache_dir=self.cache_dir,
            progress=report,
            max_disk_bytes=self.max_disk_bytes,
            unknown=_explain_unknown,
        )

    def network(self, swarm: str) -> "Network":
        """Return the client's connection to ``swarm``. Raises the errors of ``client_network``."""
        from swarmnet.swarm_file.entry import client_network

        return client_network(swarm, self.bootstrap, self.data_dir, self.hosts)


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """A peer's way into a swarm, the folders of its files, and its limits."""

    bootstrap: BootstrapOption = field(default_factory=list)
    listen: ListenOption = field(default_factory=list)
    announce: AnnounceOption = field(default_factory=list)
    data_dir: DataDirOption
    cache_dir: CacheDirOption
    max_disk_bytes: MaxDiskOption
    limits: LimitOptions
    priority: PriorityOption = "low"
    issuer: IssuerOption = None
    public_name: PublicNameOption = ""

    def named(self) -> "MachineOptions":
        """Return the options with a name: the owner's, or the host name. People in one room know
        their computers by the host name."""
        return replace(self, public_name=self.public_name or platform.node())

    def enter(self, swarm: str) -> "Entry":
        from swarmnet.swarm_file.entry import enter

        return enter(swarm, self.data_dir, self.bootstrap)

    def network(self, entry: "Entry", *, keeps_ports: bool = False) -> "Network":
        """Return the peer's connection. Without ``--listen``, and with ``keeps_ports``, it listens
        on the ports that it had last."""
        listen = self.listen
        if keeps_ports or not listen:
            listen = list(usual_listen(self.data_dir, listen))
        return entry.network(listen, self.announce, self.issuer)

    def owner_limits(self) -> "OwnerLimits":
        """Return the limits that this machine has stored, with the given ones in their place."""
        from swarmnet_node.owner.machine import load_limits

        return self.limits.applied_to(load_limits(self.data_dir))

    def give_way(self) -> None:
        """Let every other program of this machine go first, if the priority is low."""
        from swarmnet_node.owner.machine import yield_to_others

        if self.priority == "low":
            yield_to_others()


async def _explain_unknown(name: str, directory: "Directory") -> None:
    """Raise ``Unreachable`` if ``name`` is a training job that nobody serves, and ``ConfigError``
    if hosts offer other models."""
    from swarmnet.cli.training.job_names import job_in_swarm
    from swarmnet_protocols.directory.catalog import read_catalog

    is_job = False
    with suppress(ConfigError, Unreachable):
        is_job = bool(await job_in_swarm(name, directory))
    if is_job:
        raise Unreachable(
            f"no machine serves the job {name!r} yet",
            hint=f"on any machine with room for its model: swarmnet join SWARM --job {name}",
        )
    offered = sorted({model.name for model in (await read_catalog(directory)).models})
    if offered:
        raise ConfigError(
            f"there is no model {name!r} on this machine or in the swarm",
            hint=f"the swarm has {', '.join(offered[:MAX_LISTED])}",
        )
