"""``swarmnet status``, ``limits``, ``pause``, ``resume`` and ``finish``: observe and control the
node on this machine. They use the socket in its data directory. ``status`` and ``finish`` also work
for other commands that run for long."""

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.foreground import DASHBOARD_FOLDER, DEFAULT_GRACE_S, describe_pause, hosted
from swarmnet.cli.limit_options import NO_LIMIT, NOTHING, LimitOptions, lifted, rows
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import DataDirOption, JsonFlag, check_at_least_zero
from swarmnet.cli.output import print_json, print_result, print_table
from swarmnet.reach import advice, describe, describe_punching, describe_relaying
from swarmnet.units import counted, parse_duration_s, show_duration, show_size
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.errors import Unreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message

    from swarmnet_protocols.wire.control_pb2 import NodeStatus
    from swarmnet_protocols.wire.records_pb2 import HostRecord
    from swarmnet_protocols.wire.report_pb2 import BlockExperts, HostReport, TrunkReport, WorkerReport


def status(*, data_dir: DataDirOption, as_json: JsonFlag = False) -> None:
    """Print what runs on this machine and what it does: a node, a bootstrap peer, a training worker
    or a dashboard."""
    _, running = _running(data_dir)
    if as_json:
        print_json(_fields(running))
    else:
        _print(running)


def limits(
    changed: LimitOptions,
    *,
    clear: Annotated[
        list[str],
        typer.Option("--clear", metavar="NAME", help="Remove this limit, such as up; repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Show or change what the node or worker on this machine may use. Changes hold at once and
    after a restart."""
    from swarmnet_node.owner import control

    removed = lifted(clear)
    changed.given()  # an impossible limit is named even without a node
    before = control.get_limits(data_dir)
    wanted = changed.applied_to(replace(before, **removed), anew=True)
    now = control.set_limits(data_dir, wanted) if wanted != before else before
    if as_json:
        print_json(asdict(now))
    else:
        print_table("what it may use", rows(now))


def pause(
    *,
    for_s: Annotated[
        int | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="End the pause after this time, such as 2h.",
            show_default="until `swarmnet resume`",
        ),
        From(str, parse_duration_s),
    ] = None,
    data_dir: DataDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Pause the node or training worker on this machine. A node's memory is free within 5 seconds,
    a worker's after its checkpoint. The pause outlasts a restart."""
    from swarmnet_node.owner import control

    control.pause(data_dir, for_s or 0.0)
    back = f"comes back in {show_duration(for_s)}, or with" if for_s else "comes back with"
    text = (
        f"the node or worker leaves its sessions or group and frees its memory; it {back} `swarmnet resume`"
    )
    print_result({"pausing": True, "for_s": for_s}, text, as_json=as_json)


def resume(*, data_dir: DataDirOption, as_json: JsonFlag = False) -> None:
    """Let the node or worker on this machine go on after `swarmnet pause`."""
    from swarmnet_node.owner import control

    control.resume(data_dir)
    text = "it goes on as soon as its limits let it; see `swarmnet status`"
    print_result({"resuming": True}, text, as_json=as_json)


def finish(
    *,
    data_dir: DataDirOption,
    grace_s: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", help="Seconds to wait for running sessions to move."),
    ] = DEFAULT_GRACE_S,
    as_json: JsonFlag = False,
) -> None:
    """Stop the node on this machine gently: it takes no new sessions, and running sessions move to
    other peers first. A training worker ends its round first; other commands stop at once."""
    from swarmnet_node.owner import control

    check_at_least_zero(grace_s, option="--grace")
    folder, running = _running(data_dir)
    control.finish(folder, grace_s)
    if running.HasField("worker"):
        text = "the worker ends its round and stops"
    elif running.command == "join" and grace_s:
        text = f"the node takes no new sessions and stops within {grace_s:g} s"
    else:
        text = "the node stops" if running.command == "join" else f"`swarmnet {running.command}` stops"
    print_result({"finishing": True, "grace_s": grace_s}, text, as_json=as_json)


def _running(data_dir: Path) -> "tuple[Path, NodeStatus]":
    """Return the folder and the status of the command that runs with ``data_dir``. A dashboard is
    looked for last, in a folder of its own. Raises ``Unreachable`` if nothing runs."""
    from swarmnet_node.owner import control

    try:
        return data_dir, control.status(data_dir)
    except Unreachable:
        folder = data_dir / DASHBOARD_FOLDER
        with suppress(Unreachable):
            return folder, control.status(folder)
        raise


def _fields(node: "NodeStatus") -> dict[str, object]:
    """Return the keys that docs/json.md lists: the fields of the message, and some fields of its
    host."""
    host = node.host
    record = host.record
    fields = _plain(node)
    trunk = _trunk(host.trunk) if host.HasField("trunk") else None
    del fields["host"]
    return fields | {
        "limits": asdict(OwnerLimits.from_json(node.limits.json)) if node.limits.json else None,
        "manifest": record.manifest.hex(),
        "blocks": [record.start, record.end],
        "moving_to": _moving_to(record),
        "precision": record.precision,
        "arithmetic": record.arithmetic,
        "sessions": record.sessions,
        "total_blocks": host.total_blocks,
        "cache_bytes": host.cache_bytes,
        "cache_bytes_limit": host.cache_bytes_limit,
        # A host of experts only computes rows.
        "tokens": host.positions if record.end else _rows(host),
        "forwards": host.forwards,
        "experts": _text(host.experts),
        "expert_rows": _rows(host),
        "expert_streams": host.expert_streams,
        "trunk": trunk,
    }


def _plain(message: "Message") -> dict[str, object]:
    """Return the fields of a message by name, for JSON: bytes in hexadecimal digits, null for unset
    fields."""

    def plain(value: object) -> object:
        return _plain(value) if hasattr(value, "DESCRIPTOR") else value  # type: ignore[arg-type]

    found: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = [plain(each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = value.hex() if isinstance(value, bytes) else plain(value)
    return found


def _trunk(trunk: "TrunkReport") -> dict[str, object]:
    texts = {"lacks": _text(trunk.lacks), "missing": _text(trunk.missing)}
    return _plain(trunk) | texts | {"missing_experts": _count(trunk.missing)}


def _moving_to(record: "HostRecord") -> list[int]:
    return [record.next_start, record.next_end] if record.next_end else []


def _text(experts: "Sequence[BlockExperts]") -> str:
    from swarmnet_protocols.directory.node_reports import experts_text

    return experts_text(experts)


def _count(experts: "Sequence[BlockExperts]") -> int:
    from swarmnet_protocols.directory.node_reports import experts_of

    return sum(map(len, experts_of(experts).values()))


def _rows(host: "HostReport") -> int:
    return sum(rows for each in host.experts for rows in each.rows)


def headline(running: "NodeStatus") -> str:
    """Return one sentence that names the running command and says what it does."""
    if running.HasField("worker") and running.state == "paused":
        return f"this worker of {running.worker.name} is paused: {describe_pause(running)}"
    if running.HasField("worker"):
        return f"this worker trains {running.worker.name}, {_progress(running.worker)}"
    if running.command == "dashboard":
        return f"this dashboard shows the swarm {running.swarm} at {running.url}"
    if running.command == "volunteer":
        why = f"is paused: {describe_pause(running)}" if running.reason else "looks for work"
        return f"this volunteer of the swarm {running.swarm} {why}"
    if running.command == "bootstrap":
        return f"this bootstrap peer lets others into the swarm {running.swarm}"
    name = running.public_name or ("this worker" if running.command == "train join" else "this node")
    if running.state == "paused":
        return f"{name} is paused: {describe_pause(running)}"
    what = f"{running.model}, {hosted(running)}"
    sessions = f", {counted(running.host.record.sessions, 'session')}" if running.host.record.end else ""
    return {
        "choosing": f"{name} chooses blocks of {running.model}",
        "joining": f"{name} is about to serve {what}",
        "leaving": f"{name} stops: its sessions move to other hosts ({what}{sessions})",
    }.get(running.state, f"{name} serves {what}{sessions}")


def _progress(worker: "WorkerReport") -> str:
    loss = f", loss {worker.loss:.3f}" if worker.HasField("loss") else ""
    return f"round {worker.round} of {worker.rounds}{loss}, {worker.state}"


def _print(running: "NodeStatus") -> None:
    of_node = _node_rows(running) if running.HasField("host") else {}
    print_table(headline(running), of_node | _peer_rows(running))


def _node_rows(node: "NodeStatus") -> dict[str, object]:
    mebibyte = 1 << 20
    host, record = node.host, node.host.record
    moving_to = _moving_to(record)
    return {
        "model": node.model + (f": {node.model_reason}" if node.model_reason else ""),
        **({"model before": node.former_model} if node.former_model else {}),
        **({"switches to": node.switching_to} if node.switching_to else {}),
        **(
            {
                "blocks": f"{record.start}:{record.end} of {host.total_blocks}"
                + (f": {node.blocks_reason}" if node.blocks_reason else "")
            }
            if record.end
            else {}
        ),
        **_experts(node),
        **({"blocks before": "{}:{}".format(*node.moved_from)} if node.moved_from else {}),
        **({"moves to": "{}:{}".format(*moving_to)} if moving_to else {}),
        **(
            {
                "sessions": record.sessions,
                "cache": f"{host.cache_bytes / mebibyte:.1f} of {host.cache_bytes_limit / mebibyte:.0f} MiB",
                "computed": f"{counted(host.positions, 'token')} in {counted(host.forwards, 'forward')}",
            }
            if record.end
            else {}
        ),
        "weights": f"{node.weight_bytes / mebibyte:.1f} MiB"
        + (f", {record.precision}" if record.precision else ""),
        **(
            {"arithmetic": record.arithmetic + (f", {node.kernels} kernels" if node.kernels else "")}
            if record.arithmetic
            else {}
        ),
    }


def _peer_rows(peer: "NodeStatus") -> dict[str, object]:
    """Return the rows of every command that runs for long: its swarm, its reach, its use of this
    machine."""
    limits = rows(OwnerLimits.from_json(peer.limits.json)) if peer.limits.json else {}
    found = {
        "warning": peer.warning,
        "volunteers": peer.volunteers,
        "swarm": f"{peer.swarm}; {counted(peer.known_peers, 'other peer')} known",
        "running for": show_duration(peer.uptime_s),
        "reached": "" if peer.command == "dashboard" else describe(peer.reach, peer.addresses),
        "to improve it": advice(peer.reach, peer.addresses),
        "hole punching": describe_punching(peer.reach),
        "relays for": describe_relaying(peer.reach),
        "memory": f"{peer.ram_bytes / (1 << 20):.0f} MiB" + _of(limits.pop("max-ram", "")),
        f"traffic in {peer.usage.month}": f"{show_size(peer.usage.up_bytes)} up, "
        f"{show_size(peer.usage.down_bytes)} down" + _of(limits.pop("monthly", "")),
        **{f"limit: {name}": text for name, text in limits.items() if text not in NOTHING},
        "version": peer.version,
        "peer id": peer.peer_id,
        "addresses": "\n".join(peer.addresses),
    }
    return {name: text for name, text in found.items() if text}


def _experts(node: "NodeStatus") -> dict[str, str]:
    """Return rows about the experts that the node computes for others, and that peers compute for
    it."""
    host, found = node.host, {}
    if host.experts:
        rows = f"{counted(_rows(host), 'row')}, {counted(host.expert_streams, 'open stream')}"
        found["experts"] = f"{_text(host.experts)} (blocks:experts)"
        found["for other hosts"] = rows
    if node.experts_needed:
        found["experts on disk"] = (
            f"{node.expert_hit_rate:.0%} were in memory when needed, {node.expert_prediction_rate:.0%} were predicted"
        )
    if host.HasField("trunk"):
        trunk = host.trunk
        times = [f"{1000 * each:.1f}" for each in trunk.round_trips_s]
        peers = counted(len(times), "peer") + (f", round trips {', '.join(times)} ms" if times else "")
        found |= {
            "experts on peers": _text(trunk.lacks) or "none any more",
            "computed by": peers + (f"; {counted(trunk.far, 'peer')} too far" if trunk.far else ""),
            "asked of peers": f"{counted(trunk.rows, 'row')}; {trunk.failed} requests failed, "
            f"{trunk.hedged} were slow; {counted(trunk.loaded, 'expert')} loaded here because no peer had them",
        }
        if trunk.missing:
            missing = f"{_text(trunk.missing)} ({counted(_count(trunk.missing), 'expert')})"
            found["missing experts"] = f"{missing}: swarmnet join SWARM --experts BLOCK:EXPERTS hosts them"
    return found


def _of(limit: str) -> str:
    """Return the text of a limit, to follow the amount in use. ``limit``: empty for a command
    without limits."""
    return f", {limit if limit == NO_LIMIT else f'limit {limit}'}" if limit else ""
