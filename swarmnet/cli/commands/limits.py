"""``swarmnet limits``: show or change what the owner of this machine allows the node to use."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from swarmnet.cli.limit_options import LimitOptions, lifted, rows
from swarmnet.cli.options import DataDirOption, JsonFlag
from swarmnet.cli.output import print_json, print_table
from swarmnet.paths import default_data_dir


def limits(
    changed: LimitOptions,
    *,
    clear: Annotated[
        list[str],
        typer.Option("--clear", metavar="NAME", help="Remove this limit, such as up; repeatable."),
    ] = [],  # noqa: B006 - typer copies it
    data_dir: DataDirOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show or change what the node on this machine may use. Changes hold at once and after a
    restart."""
    from swarmnet_node.owner import control

    changes = lifted(clear) | changed.given()
    folder = data_dir or default_data_dir()
    before = control.get_limits(folder)
    wanted = replace(before, **changes)
    now = control.set_limits(folder, wanted) if wanted != before else before
    if as_json:
        print_json(asdict(now))
    else:
        print_table("what the node may use", rows(now))
