"""The options that all clients share: how a client enters a swarm, and where its files are."""

from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    HostsOption,
    MaxDiskOption,
    TransportOption,
)
from swarmnet.paths import default_cache_dir
from swarmnet.swarm_file.entry import client_network
from swarmnet_protocols.joining.network import Network


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How a client enters a swarm, and where its files are."""

    transport: TransportOption = "auto"
    bootstrap: BootstrapOption = field(default_factory=list)
    hosts: HostsOption
    data_dir: DataDirOption = None
    cache_dir: CacheDirOption = None
    max_disk_bytes: MaxDiskOption

    @property
    def models(self) -> Path:
        """The folder of model files."""
        return self.cache_dir or default_cache_dir()

    def network(self, swarm: str) -> Network:
        """The client's connection to ``swarm``. Raises the errors of ``client_network``."""
        return client_network(swarm, self.bootstrap, self.data_dir, self.hosts)
