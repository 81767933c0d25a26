"""``swarmnet pause``, ``resume`` and ``finish``: control the node on this machine."""

from typing import Annotated

import typer

from swarmnet.cli.foreground import DEFAULT_GRACE_S
from swarmnet.cli.options import DataDirOption, JsonFlag, check_at_least_zero
from swarmnet.cli.output import print_json, print_text
from swarmnet.paths import default_data_dir


def pause(*, data_dir: DataDirOption = None, as_json: JsonFlag = False) -> None:
    """Pause the node on this machine until `swarmnet resume`. Its memory is free within 5
    seconds."""
    from swarmnet_node.owner import control

    control.pause(data_dir or default_data_dir())
    if as_json:
        print_json({"pausing": True})
    else:
        print_text(
            "the node asks its sessions to move and frees its memory; `swarmnet resume` brings it back"
        )


def resume(*, data_dir: DataDirOption = None, as_json: JsonFlag = False) -> None:
    """Let the node on this machine serve again after `swarmnet pause`."""
    from swarmnet_node.owner import control

    folder = data_dir or default_data_dir()
    control.resume(folder)
    if as_json:
        print_json({"resuming": True})
    else:
        print_text("the node serves again as soon as its limits let it; see `swarmnet status`")


def finish(
    *,
    data_dir: DataDirOption = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", help="Seconds to wait for running sessions to move."),
    ] = DEFAULT_GRACE_S,
    as_json: JsonFlag = False,
) -> None:
    """Stop the node on this machine gently: it takes no new sessions, and running sessions move to
    other peers first."""
    from swarmnet_node.owner import control

    check_at_least_zero(grace_s, option="--grace")
    control.finish(data_dir or default_data_dir(), grace_s)
    if as_json:
        print_json({"finishing": True, "grace_s": grace_s})
    else:
        print_text(f"the node takes no new sessions and stops within {grace_s:g} s")
