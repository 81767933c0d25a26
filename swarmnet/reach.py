"""Words for the way in which peers reach a node, and advice to improve it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmnet.units import counted
from swarmnet_protocols.net.dialling import is_loopback

if TYPE_CHECKING:
    from swarmnet_protocols.wire.report_pb2 import Reach

_ID_CHARS = 8


def describe(reach: "Reach", addresses: Sequence[str]) -> str:
    """Return how other peers reach the node with these ``addresses``, in one line."""
    if reach.kind == "unknown" and addresses and all(map(is_loopback, addresses)):
        return "from this machine only: it listens on no other address"
    relays = ", ".join(f"…{each[-_ID_CHARS:]}" for each in reach.relays)
    nat = f" ({reach.nat} NAT)" if reach.nat else ""
    return {
        "unknown": "not known yet: no other machine has connected to it",
        "open": "directly",
        "forwarded": "directly, through a port that the router forwards",
        "relayed": f"through {'relays' if len(reach.relays) > 1 else 'the relay'} {relays}, and directly by hole punching{nat}",
        "unreachable": f"not at all{nat}: no relay takes this node",
    }[reach.kind]


def describe_punching(reach: "Reach") -> str:
    """Return counts of hole punching; empty before the first."""
    if not reach.punched + reach.not_punched:
        return ""
    mean = f" in {reach.punch_s:.1f} s on average" if reach.punched else ""
    return f"{reach.punched} of {counted(reach.punched + reach.not_punched, 'attempt')} connected{mean}"


def describe_relaying(reach: "Reach") -> str:
    """Return the use of the node as a relay, as text; empty if it has none."""
    if not (reach.reservations or reach.forwarded_bytes):
        return ""
    forwarded = f"{reach.forwarded_bytes / (1 << 20):.1f} MiB"
    return f"{counted(reach.reservations, 'peer')}, {counted(reach.forwarded_circuits, 'stream')} now, {forwarded} forwarded"


def advice(reach: "Reach", addresses: Sequence[str]) -> str:
    """Return advice to the owner on how peers can reach the node directly; empty if they do."""
    if reach.kind not in ("relayed", "unreachable"):
        return ""
    direct = [each for each in addresses if "/p2p-circuit" not in each]
    if direct and all(map(is_loopback, direct)):
        return (
            "this machine listens on loopback only: leave out --listen, or give an address that others reach"
        )
    ports = {}
    for address in direct:
        match address.split("/"):
            case ["", _, _, "tcp" | "udp" as kind, port, *_]:
                ports[kind] = port
    named = " and ".join(f"{kind.upper()} port {port}" for kind, port in sorted(ports.items()))
    return f"enable UPnP on the router, or forward {named or 'the port of --listen'} there to this machine"
