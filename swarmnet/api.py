"""The public Python names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet import swarm_file
from swarmnet.addresses import check_peer_address
from swarmnet.paths import default_cache_dir
from swarmnet_protocols.clock import wall_clock

if TYPE_CHECKING:
    from swarmnet_client.model import Form, SwarmModel


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
        device: str = "auto",
        cache_dir: str | Path | None = None,
    ) -> "SwarmModel":
        """A transformers model that runs on the swarm of the file ``swarm``.

        ``bootstrap`` adds addresses of peers to those in the file; ``device`` is where embeddings and head are. Use the model as a context manager, or ``close`` it.
        """
        from swarmnet_client.model import Form

        return _open(name, Path(swarm), bootstrap, cache_dir, Form(dtype, device))


class AutoSwarmModelForSequenceClassification:
    """Opens a classifier whose blocks run on a swarm; its head, ``score``, is here."""

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - named as in transformers
        cls,
        name: str,
        *,
        num_labels: int,
        swarm: str | Path,
        bootstrap: Sequence[str] = (),
        dtype: str = "auto",
        device: str = "auto",
        cache_dir: str | Path | None = None,
    ) -> "SwarmModel":
        """The model's ForSequenceClassification of transformers, with a fresh ``score`` where the checkpoint has none.

        The other arguments are those of ``AutoSwarmModelForCausalLM.from_pretrained``.
        """
        from swarmnet_client.model import Form

        return _open(name, Path(swarm), bootstrap, cache_dir, Form(dtype, device, num_labels))


def _open(
    name: str, swarm: Path, bootstrap: Sequence[str], cache_dir: str | Path | None, form: "Form"
) -> "SwarmModel":
    from swarmnet_client import model

    file = swarm_file.load_valid(swarm, wall_clock())
    for address in bootstrap:
        check_peer_address(address)
    opened: SwarmModel = model.load(
        name,
        swarm=file.swarm_id,
        bootstrap=(*file.bootstrap, *bootstrap),
        cache_dir=default_cache_dir() if cache_dir is None else Path(cache_dir),
        form=form,
    )
    return opened
