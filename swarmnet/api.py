"""The public Python names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet import swarm_file
from swarmnet.addresses import check_peer_address
from swarmnet.paths import default_cache_dir
from swarmnet_protocols.clock import wall_clock

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
    ) -> "SwarmModel":
        """A transformers model that runs on the swarm of the file ``swarm``.

        ``bootstrap`` adds addresses of peers to those in the file. Use the model as a context manager, or ``close`` it.
        """
        from swarmnet_client import model

        file = swarm_file.load_valid(Path(swarm), wall_clock())
        for address in bootstrap:
            check_peer_address(address)
        opened: SwarmModel = model.load(
            name,
            swarm=file.swarm_id,
            bootstrap=(*file.bootstrap, *bootstrap),
            cache_dir=default_cache_dir() if cache_dir is None else Path(cache_dir),
            dtype=dtype,
        )
        return opened
