"""The public Python names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.addresses import check_peer_address
from swarmnet.entering import client_network
from swarmnet.paths import default_cache_dir

if TYPE_CHECKING:
    from swarmnet_client.model import SwarmModel


class AutoSwarmModelForCausalLM:
    """Opens a model whose blocks run on a swarm."""

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        swarm: str | Path,
        bootstrap: Sequence[str] = (),
        dtype: str = "auto",
        cache_dir: str | Path | None = None,
        data_dir: str | Path | None = None,
    ) -> "SwarmModel":
        """A transformers model that runs on the swarm of the file or invite ``swarm``.

        ``bootstrap`` adds addresses of peers to those in the file. ``data_dir`` keeps who we are in swarms with members. Use
        the model as a context manager, or ``close`` it.
        """
        for address in bootstrap:
            check_peer_address(address)
        network = client_network(str(swarm), bootstrap, Path(data_dir) if data_dir else None)
        from swarmnet_client import model

        opened: SwarmModel = model.load(
            name,
            network=network,
            cache_dir=default_cache_dir() if cache_dir is None else Path(cache_dir),
            dtype=dtype,
        )
        return opened
