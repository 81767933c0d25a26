"""Finding out the facts: all at once, each within its deadline."""

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from swarmnet.doctor import facts, local, peers
from swarmnet.doctor.checks import TESTED
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.joining.network import ANY_PORT, LOOPBACK
from swarmnet_protocols.machine.clock import wall_clock

if TYPE_CHECKING:
    from swarmnet.swarm_file.entry import Entry
    from swarmnet_node.owner.control import NodeStatus

T = TypeVar("T")
D = TypeVar("D")

LOCAL_S = 6.0
PEERS_S = 9.0


@dataclass(frozen=True)
class Question:
    """What a person wants examined."""

    data_dir: Path
    cache_dir: Path
    swarm: str | None = None
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()


async def gather(question: Question) -> facts.Facts:
    """All the facts. What cannot be found out is named among them, not raised."""
    inquiry = _Inquiry()
    node = await inquiry.local("node", lambda: local.node_in(question.data_dir), None)
    # Beside a node that runs we are another peer, as `swarmnet run` is.
    directory = question.data_dir / "client" if node else question.data_dir
    listen = () if node else question.listen
    swarm, entry = await inquiry.local(
        "swarm", lambda: local.enter(question.swarm, directory, question.bootstrap), (None, None)
    )
    device, disks, listening, (seen_by, ports) = await asyncio.gather(
        inquiry.local("device", local.device, facts.Device()),
        inquiry.local(
            "disk",
            lambda: [
                local.disk("keys and state", question.data_dir),
                local.disk("models", question.cache_dir),
            ],
            [],
        ),
        inquiry.local("listen", lambda: local.listening(listen), []),
        inquiry.within(PEERS_S, "peers", _peers(entry, listen, node), ([], [])),
    )
    return facts.Facts(
        now=wall_clock(),
        data_dir=question.data_dir,
        python=sys.version_info[:2],
        installed={name: local.version_of(name) for name in TESTED},
        disks=disks,
        memory=local.memory(),
        device=device,
        compiler=shutil.which("cc") or "",
        secrets=local.secrets(question.data_dir),
        node=node.state if node else "",
        node_warning=node.warning if node else "",
        listening=listening,
        swarm=swarm,
        peers=seen_by,
        ports=ports,
        not_gathered=inquiry.missing,
    )


async def _peers(
    entry: "Entry | None", listen: tuple[str, ...], node: "NodeStatus | None"
) -> tuple[list[facts.Peer], list[int]]:
    if entry is None or not entry.bootstrap:
        return [], []
    if node is not None:
        return await peers.ask(entry, LOOPBACK, node.addresses)
    return await peers.ask(entry, listen or ANY_PORT)


class _Inquiry:
    """Collects why something could not be found out."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}

    async def local(self, name: str, find: Callable[[], T], default: D) -> T | D:
        return await self.within(LOCAL_S, name, asyncio.to_thread(find), default)

    async def within(self, deadline_s: float, name: str, finding: Awaitable[T], default: D) -> T | D:
        try:
            async with asyncio.timeout(deadline_s):
                return await finding
        except TimeoutError:
            self.missing[name] = f"it took more than {deadline_s:g} s"
        except (SwarmnetError, OSError) as error:
            self.missing[name] = str(error)
        return default
