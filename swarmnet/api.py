"""The public Python names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.addresses import check_peer_address, parse_hosts
from swarmnet.paths import default_cache_dir
from swarmnet.swarm_file.entry import client_network

if TYPE_CHECKING:
    from swarmnet_client.model.load_options import LoadOptions
    from swarmnet_client.model.model import SwarmModel
    from swarmnet_protocols.joining.network import Network


class AutoSwarmModelForCausalLM:
    """Opens a model whose blocks run on a swarm."""

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - named as in transformers
        cls,
        name: str,
        *,
        swarm: str | Path,
        bootstrap: Sequence[str] = (),
        hosts: Sequence[str] = (),
        dtype: str = "auto",
        device: str = "auto",
        cache_dir: str | Path | None = None,
        data_dir: str | Path | None = None,
        standby: bool | None = None,
        wire: str = "auto",
        draft: str = "",
        wait_s: float = 0.0,
    ) -> "SwarmModel":
        """Return a transformers model that runs on the swarm of the file or invite ``swarm``.

        Use the model as a context manager, or ``close`` it.

        - ``bootstrap``: addresses of peers, in addition to the addresses in the file.
        - ``hosts``: peer ids. Only these hosts are used.
        - ``device``: computes the embeddings and the head.
        - ``data_dir``: keeps this client's identity and its certificate.
        - ``standby``: whether a second host computes along with each host of a session and takes
          over at once if that host fails. None: only for long texts, on idle hosts.
        - ``wire``: the number format of activations between hosts: ``auto`` (as the hosts compute),
          ``float32``, ``bfloat16`` or ``int8`` (a quarter of float32's bytes, but rounded).
        - ``draft``: a small model with the same tokenizer, which runs in this process and proposes
          the next tokens. Answers stay the same.
        - ``wait_s``: seconds that a call waits while all hosts of some blocks are overloaded.
        """
        from swarmnet_client.model.load_options import LoadOptions

        options = LoadOptions.picked(dtype, device, wire=wire, standby=standby, draft=draft, wait_s=wait_s)
        return _open(name, _network(swarm, bootstrap, data_dir, hosts), cache_dir, options)


class AutoSwarmModelForSequenceClassification:
    """Opens a classifier whose blocks run on a swarm; its head, ``score``, runs in this process."""

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - named as in transformers
        cls,
        name: str,
        *,
        num_labels: int,
        swarm: str | Path,
        bootstrap: Sequence[str] = (),
        hosts: Sequence[str] = (),
        dtype: str = "auto",
        device: str = "auto",
        cache_dir: str | Path | None = None,
        data_dir: str | Path | None = None,
    ) -> "SwarmModel":
        """Open the model with a classification head (transformers' ForSequenceClassification). If
        the checkpoint has no head, a new one is initialised.

        The other arguments are as in ``AutoSwarmModelForCausalLM.from_pretrained``.
        """
        from swarmnet_client.model.load_options import LoadOptions

        return _open(
            name,
            _network(swarm, bootstrap, data_dir, hosts),
            cache_dir,
            LoadOptions.picked(dtype, device, num_labels),
        )


def _network(
    swarm: str | Path, bootstrap: Sequence[str], data_dir: str | Path | None, hosts: Sequence[str]
) -> "Network":
    for address in bootstrap:
        check_peer_address(address)
    return client_network(
        str(swarm), bootstrap, Path(data_dir) if data_dir else None, parse_hosts(",".join(hosts))
    )


def _open(
    name: str, network: "Network", cache_dir: str | Path | None, options: "LoadOptions"
) -> "SwarmModel":
    from swarmnet_client.model import model

    opened: SwarmModel = model.load(
        name,
        network=network,
        cache_dir=default_cache_dir() if cache_dir is None else Path(cache_dir),
        options=options,
    )
    return opened
