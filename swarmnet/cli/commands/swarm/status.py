"""``swarmnet swarm status``: what a swarm does, seen from any machine that may enter it.

1. The command enters the swarm as a client, and runs the observer of the dashboard.
2. It waits until the directory is read and every peer has answered or failed once.
3. It prints the state that the dashboard shows; with ``--live`` again and again.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet.cli.options import ENTERED, BootstrapOption, DataDirOption, JsonFlag
from swarmnet.cli.output import clear_terminal, note, print_json, print_table, print_text, progress
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet.units import counted

if TYPE_CHECKING:
    from swarmnet.dashboard.observing.observations import Snapshot

ASK_S = 15.0
"""Seconds to wait for the answers of peers. A peer that cannot be reached takes that long."""
LIVE_EVERY_S = 2.0
MAX_SHOWN = 40
"""Most peers in the list for people; ``--json`` has all of them."""
REACHED = {
    "direct": "directly",
    "forwarded": "through a forwarded port",
    "relayed": "through relays",
    "unreachable": "by nobody",
}


def status(
    swarm: Annotated[
        str, typer.Argument(metavar="[SWARM]", help=ENTERED, show_default="this directory")
    ] = ".",
    *,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption,
    live: Annotated[
        bool, typer.Option("--live", "--watch", help="Show the state again every 2 seconds, until Ctrl-C.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print who takes part in a swarm now, which models it serves and how fast, and what it lacks.

    This works from any machine that may enter the swarm. No node needs to run here.

    \b
    Examples:
      swarmnet swarm status lab
      swarmnet swarm status invite.txt --live
    """
    with ExitStack() as waiting:
        waiting.enter_context(progress(quiet=as_json))("asking the swarm", 0, None)
        entry = enter(swarm, data_dir, bootstrap, as_client=True)
        entry.check_bootstrap()
        name = swarm if entry.source else entry.file.name  # an invite is a secret
        asyncio.run(_show(entry, name, waiting, live=live, as_json=as_json))


async def _show(entry: Entry, name: str, waiting: ExitStack, *, live: bool, as_json: bool) -> None:
    from random import SystemRandom

    from swarmnet.dashboard.observing.observations import SwarmInfo
    from swarmnet.dashboard.observing.observer import Observer
    from swarmnet.dashboard.observing.polling import ObserverDependencies
    from swarmnet_protocols.directory.relay_announcements import RelayFinder
    from swarmnet_protocols.joining.network import client_listen, connect
    from swarmnet_protocols.net.multiaddr import peer_in

    file = entry.file
    listed = {model.manifest: model.name for model in file.models}
    network = entry.network(client_listen(entry.addresses))
    async with AsyncExitStack() as stack:
        transport, directory = await stack.enter_async_context(connect(network, client_mode=True))
        dependencies = ObserverDependencies(transport, directory)
        about = SwarmInfo(file.name, file.swarm_id.hex(), str(file.admission), transport.peer_id, (name,))
        observer = await stack.enter_async_context(Observer(dependencies, about, listed).running())
        relays = RelayFinder(directory, SystemRandom())
        await observer.settled(ASK_S)
        while True:
            state = swarm_state(observer.snapshot(), map(peer_in, await relays.find()))
            waiting.close()
            _print(state, live=live, as_json=as_json)
            if not live:
                return
            await asyncio.sleep(LIVE_EVERY_S)


def swarm_state(snapshot: "Snapshot", relays: Iterable[str]) -> dict[str, Any]:
    """Return the JSON of a swarm: what the dashboard shows, the missing blocks of each model, and
    the ids of ``relays``.

    Times of tokens are counted since the start of each host, because nobody observed the swarm
    before. Hosts that do not answer are listed, but their blocks count as missing: a client of this
    machine cannot use them.
    """
    from swarmnet.dashboard.experts import runs
    from swarmnet.dashboard.observing.counts import Counts, counts_of
    from swarmnet.dashboard.state import derive

    recent: dict[bytes, Counts] = {}
    for seen in snapshot.peers:
        if seen.newest is not None:
            host = seen.newest.report.host
            recent[host.record.manifest] = recent.get(host.record.manifest, Counts()) + counts_of(host)
    answering = [seen for seen in snapshot.peers if seen.failed_at_s is None]
    body = derive(snapshot).body
    seen_models = derive(replace(snapshot, recent=recent, peers=answering)).body["models"]
    models = {
        key: model | {"missing_blocks": runs([n for n, hosts in enumerate(model["replicas"]) if not hosts])}
        for key, model in seen_models.items()
    }
    peers = {key: peer for key, peer in body["peers"].items() if peer["state"] != "gone"}
    used = [relay for peer in peers.values() for relay in peer["relays"]]
    return {
        "swarm": body["swarm"],
        "models": models,
        "peers": peers,
        "jobs": body["jobs"],
        "relays": {relay: used.count(relay) for relay in sorted({*relays, *used})},
    }


def _print(state: Mapping[str, Any], *, live: bool, as_json: bool) -> None:
    if as_json:
        print_json(state)
        return
    if live:
        clear_terminal()
    peers = state["peers"]
    print_text(f"the swarm {state['swarm']['name']}: {_who(peers)}")
    for model in state["models"].values():
        print_text()
        print_table(
            f"{model['name']} {'answers' if model['healthy'] else 'cannot answer'}", model_rows(model)
        )
    for job in state["jobs"].values():
        print_text()
        print_table(f"training: {job['name']}", _job_rows(job))
    if peers:
        print_text()
        shown = dict(list(peers.items())[:MAX_SHOWN])
        print_table(
            "peers", {_name(key, peer): peer_row(peer, state["models"]) for key, peer in shown.items()}
        )
        if len(peers) > MAX_SHOWN:
            note(f"and {len(peers) - MAX_SHOWN} more: --json lists all")
    if state["relays"]:
        print_text()
        print_table(
            "relays",
            {
                _name(key, peers.get(key, {"name": None})): f"used by {counted(number, 'peer')}"
                for key, number in state["relays"].items()
            },
        )
    if not state["models"]:
        note(f"no peer hosts a model yet: swarmnet join {state['swarm']['join']}")


def _who(peers: Mapping[str, Mapping[str, Any]]) -> str:
    words = {"host": "host", "experts": "expert peer", "worker": "worker"}
    texts = []
    for role, word in words.items():
        found = [peer for peer in peers.values() if peer["role"] == role]
        serving = sum(peer["state"] == "online" and not peer["silent"] for peer in found)
        if found:
            texts.append(counted(len(found), word) + (f" ({serving} online)" if serving < len(found) else ""))
    return ", ".join(texts) or "nobody yet"


def model_rows(model: Mapping[str, Any]) -> dict[str, object]:
    """Return what people read about a model: its blocks, its speed, and what helps it most."""
    fewest = model["weakest"]["replicas"]
    missing = ", ".join(f"{start}:{end}" for start, end in model["missing_blocks"])
    first, token = model["first_token_s"], model["token_s"]
    advice = model["advice"]
    return {
        "blocks": f"{model['blocks']}; "
        + (f"nobody has {missing}" if missing else f"each has {counted(fewest, 'host')} or more"),
        "sessions": model["sessions"],
        "speed": f"{1 / token['p50']:.1f} tokens/s for one answer"
        if token and token["p50"]
        else "not measured yet",
        **({"first token": f"after {first['p50']:.1f} s"} if first else {}),
        "helps most": f"{advice['reason']}\n{advice['command']}",
    }


def peer_row(peer: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line about a peer: what it does, how others reach it, and how busy it is."""
    is_online = peer["state"] == "online"
    facts = [peer["state"] + (", does not answer" if peer["silent"] and is_online else "")]
    if peer["blocks"]:
        model = models.get(peer["model"], {"name": "another model"})
        facts.append(f"blocks {peer['blocks'][0]}:{peer['blocks'][1]} of {model['name']}")
    if peer["experts"]:
        facts.append("routed experts")
    if peer["job"]:
        facts.append("trains")
    if peer["blocks"] and is_online and not peer["silent"]:
        busy = f", {peer['positions_per_s']:.1f} positions/s" if peer["positions_per_s"] else ""
        facts.append(counted(peer["sessions"], "session") + busy)
    if peer["connection"] != "unknown":
        facts.append(f"reached {REACHED[peer['connection']]}")
    if peer["delay_s"] is not None:
        facts.append(f"{1000 * peer['delay_s']:.0f} ms away")
    return ", ".join(facts)


def _name(key: str, peer: Mapping[str, Any]) -> str:
    return f"{peer['name']} …{key[-6:]}" if peer["name"] else f"…{key[-6:]}"


def _job_rows(job: Mapping[str, Any]) -> dict[str, object]:
    return {
        "progress": f"round {job['round']} of {job['rounds']}, {job['state']}",
        "workers": job["workers"],
        **({"loss": f"{job['loss']:.3f}"} if job["loss"] is not None else {}),
    }
