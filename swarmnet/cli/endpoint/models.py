"""``swarmnet models``: the models that the hosts of a swarm offer, complete or forming."""

import asyncio
from typing import TYPE_CHECKING

from swarmnet.cli.options import BootstrapOption, DataDirOption, JsonFlag, SwarmOption
from swarmnet.cli.output import note, print_json, print_table, progress
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet.units import counted

if TYPE_CHECKING:
    from swarmnet_client.hosts.model_offers import ModelOffer


def models(
    *,
    swarm: SwarmOption,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Print the models of a swarm: how fast they answer at most, or which blocks nobody hosts.

    \b
    Examples:
      swarmnet models --swarm lab
      swarmnet serve --swarm lab     # serves all of them
    """
    with progress(quiet=as_json) as report:
        report("asking the swarm for its models", 0, None)
        entry = enter(swarm, data_dir, bootstrap, as_client=True)
        entry.check_bootstrap()
        offers = asyncio.run(_read(entry))
    if as_json:
        print_json({"models": [{"name": offer.name, **offer.fields()} for offer in offers]})
        return
    if not offers:
        note("no peer hosts a model yet: swarmnet join SWARM")
    print_table("", {offer.name: model_row(offer) for offer in offers})


async def _read(entry: Entry) -> "list[ModelOffer]":
    from random import SystemRandom

    from swarmnet_client.hosts.model_offers import SwarmOffers
    from swarmnet_protocols.joining.network import client_listen, connect

    network = entry.network(client_listen(entry.addresses))
    async with connect(network, client_mode=True) as (_, directory):
        offers = await SwarmOffers(directory, network.rules, SystemRandom()).read()
        return sorted(offers, key=lambda offer: offer.name)


def model_row(offer: "ModelOffer") -> str:
    """Return the facts about a model as text."""
    facts = [f"forming: {offer.lack()}" if offer.missing else f"available, {counted(offer.blocks, 'block')}"]
    if offer.tokens_per_s:
        facts.append(f"up to {offer.tokens_per_s:.0f} tokens/s")
    if offer.context:
        facts.append(f"context of {offer.context} tokens")
    return ", ".join(facts)
