"""``swarmnet stats``: shows what this machine has given to swarms, over restarts and updates."""

from typing import TYPE_CHECKING

from swarmnet.cli.options import DataDirOption, JsonFlag
from swarmnet.cli.output import note, print_json, print_table, print_text
from swarmnet.units import counted, show_duration, show_number, show_size, show_time
from swarmnet_protocols.errors import SwarmnetError

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnet_protocols.wire.report_pb2 import Given


def stats(*, data_dir: DataDirOption, as_json: JsonFlag = False) -> None:
    """Print what this machine has given: work for models, clients served, training, traffic, time
    and energy.

    A running node or worker tells its totals of now. Otherwise they come from a file, which lacks
    the last minute of a process that was killed.
    """
    from swarmnet_node.owner.given import CORE_WATTS, GPU_WATTS

    given = _of_node(data_dir) or _stored(data_dir)
    if as_json:
        fields = (
            "block_positions",
            "clients",
            "samples",
            "sent_bytes",
            "received_bytes",
            "active_s",
            "kwh",
            "since",
        )
        found = {name: getattr(given, name) if given is not None else 0 for name in fields}
        print_json(found | {"core_watts": CORE_WATTS, "gpu_watts": GPU_WATTS})
    elif given is None:
        print_text("this machine has given nothing yet: `swarmnet join` hosts a part of a model")
    else:
        _print(given)


def _of_node(data_dir: "Path") -> "Given | None":
    from swarmnet_node.owner import control

    try:
        status = control.status(data_dir)
        return status.given if status.HasField("given") else None
    except SwarmnetError:  # no node runs, or it is too busy to answer
        return None


def _stored(data_dir: "Path") -> "Given | None":
    from swarmnet_node.owner.given import load_given

    given = load_given(data_dir, note)
    return None if given is None else given.message()


def _print(given: "Given") -> None:
    from swarmnet_node.owner.given import CORE_WATTS, GPU_WATTS

    energy = f"about {given.kwh:.2f} kWh" if given.kwh >= 0.01 else "less than 0.01 kWh"
    print_table(
        f"given since {show_time(given.since)}",
        {
            "computed": f"{show_number(given.block_positions)} positions × blocks: each position counts once for every block that it passed, in training twice",
            "clients": f"{counted(given.clients, 'client')} served: in an open swarm, each start of `run` or `serve` counts as one, because clients are anonymous there; elsewhere each machine does",
            "training": counted(given.samples, "sample"),
            "traffic": f"{show_size(given.sent_bytes)} sent, {show_size(given.received_bytes)} received",
            "time": f"{show_duration(given.active_s)} of serving or training",
            "energy": f"{energy}, if a busy core takes {CORE_WATTS:g} W and a busy GPU {GPU_WATTS:g} W",
        },
    )
