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
            "model": node.model,
            **(
                {
                    "blocks": f"{node.start}:{node.end} of {node.total_blocks}"
                    + (f": {node.blocks_reason}" if node.blocks_reason else "")
                }
                if node.end
                else {}
            ),
            **({"experts": f"{node.experts} (blocks:experts)"} if node.experts else {}),
            **({"blocks before": "{}:{}".format(*node.moved_from)} if node.moved_from else {}),
            **({"moves to": "{}:{}".format(*node.moving_to)} if node.moving_to else {}),
            "sessions": node.sessions,
            "cache": f"{node.cache_bytes / mebibyte:.1f} of {node.cache_bytes_limit / mebibyte:.0f} MiB",
            "weights": f"{node.weight_bytes / mebibyte:.1f} MiB",
            "computed": f"{counted(node.tokens, 'token')} in {counted(node.forwards, 'forward')}",
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


def _of(limit: str) -> str:
    return limit if limit == "no limit" else f"limit {limit}"
