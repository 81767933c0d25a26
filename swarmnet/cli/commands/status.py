"""``swarmnet status``: what the node on this machine is doing."""

from typing import TYPE_CHECKING

from swarmnet.cli.limit_options import rows
from swarmnet.cli.options import DataDirOption, JsonFlag
from swarmnet.cli.output import print_json, print_table
from swarmnet.paths import default_data_dir
from swarmnet.reach import advice, describe, describe_punching, describe_relaying
from swarmnet.units import counted, show_duration, show_size

if TYPE_CHECKING:
    from swarmnet_node.owner.control import NodeStatus


def status(*, data_dir: DataDirOption = None, as_json: JsonFlag = False) -> None:
    """Print what the node on this machine is doing."""
    from swarmnet_node.owner import control

    node = control.status(data_dir or default_data_dir())
    if as_json:
        print_json(_fields(node))
    else:
        _print(node)


def _fields(node: "NodeStatus") -> dict[str, object]:
    from dataclasses import asdict

    fields = asdict(node)
    span = [fields.pop("start"), fields.pop("end")]
    lists = {name: list(fields[name]) for name in ("addresses", "moved_from", "moving_to")}
    return fields | {"manifest": node.manifest.hex(), "blocks": span} | lists


def _print(node: "NodeStatus") -> None:
    mebibyte = 1 << 20
    limits = rows(node.limits)
    print_table(
        f"{node.peer_id} is {node.state}" + (f": {node.reason}" if node.reason else ""),
        {
            **({"warning": node.warning} if node.warning else {}),
            "swarm": node.swarm,
            "model": node.model + (f": {node.model_reason}" if node.model_reason else ""),
            **({"model before": node.former_model} if node.former_model else {}),
            **({"switches to": node.switching_to} if node.switching_to else {}),
            **(
                {
                    "blocks": f"{node.start}:{node.end} of {node.total_blocks}"
                    + (f": {node.blocks_reason}" if node.blocks_reason else "")
                }
                if node.end
                else {}
            ),
            **_experts(node),
            **({"blocks before": "{}:{}".format(*node.moved_from)} if node.moved_from else {}),
            **({"moves to": "{}:{}".format(*node.moving_to)} if node.moving_to else {}),
            **(
                {
                    "sessions": node.sessions,
                    "cache": f"{node.cache_bytes / mebibyte:.1f} of {node.cache_bytes_limit / mebibyte:.0f} MiB",
                    "computed": f"{counted(node.tokens, 'token')} in {counted(node.forwards, 'forward')}",
                }
                if node.end
                else {}
            ),
            "weights": f"{node.weight_bytes / mebibyte:.1f} MiB",
            "running for": show_duration(node.uptime_s),
            "reached": describe(node.reach),
            **{
                name: text
                for name, text in {
                    "to improve it": advice(node.reach, node.addresses),
                    "hole punching": describe_punching(node.reach),
                    "relays for": describe_relaying(node.reach),
                }.items()
                if text
            },
            "addresses": "\n".join(node.addresses),
            "memory": f"{node.ram_bytes / mebibyte:.0f} MiB, {_of(limits.pop('memory'))}",
            f"traffic in {node.usage.month}": f"{show_size(node.usage.up_bytes)} up, "
            f"{show_size(node.usage.down_bytes)} down, {_of(limits.pop('in a month'))}",
            **{
                f"limit: {name}": text
                for name, text in limits.items()
                if text not in {"no limit", "always", "all"}
            },
            "version": node.version,
        },
    )


def _experts(node: "NodeStatus") -> dict[str, str]:
    """Rows about the experts that the node computes for others, and that peers compute for it."""
    found = {}
    if node.experts:
        rows = f"{counted(node.expert_rows, 'row')}, {counted(node.expert_streams, 'open stream')}"
        found["experts"] = f"{node.experts} (blocks:experts)"
        found["for other hosts"] = rows
    if node.experts_needed:
        found["experts on disk"] = (
            f"{node.expert_hit_rate:.0%} of those needed were in memory, {node.expert_prediction_rate:.0%} predicted"
        )
    if (trunk := node.trunk) is not None:
        times = [f"{1000 * each:.1f}" for each in trunk.round_trips_s]
        peers = counted(len(times), "peer") + (f", round trips {', '.join(times)} ms" if times else "")
        found |= {
            "experts on peers": trunk.lacks or "none any more",
            "computed by": peers + (f"; {counted(trunk.far, 'peer')} too far" if trunk.far else ""),
            "asked of peers": f"{counted(trunk.rows, 'row')}; {trunk.failed} requests failed, "
            f"{trunk.hedged} were slow; {counted(trunk.loaded, 'expert')} loaded for lack of a peer",
        }
        if trunk.missing:
            missing = f"{trunk.missing} ({counted(trunk.missing_experts, 'expert')})"
            found["missing experts"] = f"{missing}: swarmnet join SWARM --experts BLOCK:EXPERTS hosts them"
    return found


def _of(limit: str) -> str:
    return limit if limit == "no limit" else f"limit {limit}"
