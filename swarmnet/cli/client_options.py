"""The options that all clients share: how a client enters a swarm, and where its files are."""

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

if TYPE_CHECKING:
    from swarmnet_protocols.joining.network import Network


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How a client enters a swarm, and where its files are."""

    transport: TransportOption = "auto"
    bootstrap: BootstrapOption = field(default_factory=list)
    hosts: HostsOption
    data_dir: DataDirOption
    cache_dir: CacheDirOption
    max_disk_bytes: MaxDiskOption

    def network(self, swarm: str) -> "Network":
        """Return the client's connection to ``swarm``. Raises the errors of ``client_network``."""
        from swarmnet.swarm_file.entry import client_network

        return client_network(swarm, self.bootstrap, self.data_dir, self.hosts)
