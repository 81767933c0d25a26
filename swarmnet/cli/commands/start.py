"""``swarmnet start``: makes a household swarm, hosts a model in it, and lets computers in the same
room join by a code."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from swarmnet.cli.commands.join import ForegroundOptions, NodeOptions, host
from swarmnet.cli.output import say
from swarmnet.cli.pairing import show_code, show_newcomer
from swarmnet.swarm_file.household import DEFAULT_NAME, invite_newcomer, own_household
from swarmnet.swarm_file.keys import KEY_NAME


def start(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Name of the swarm, for a second one on this computer.")
    ] = DEFAULT_NAME,
    *,
    options: NodeOptions,
    foreground: ForegroundOptions,
) -> None:
    """Start a swarm of the computers in this room, and host a model in it.

    Type `swarmnet join` on each other computer. This one then shows a code. Typed there, it makes
    that computer a member. Start the swarm again with the same command.

    \b
    Examples:
      swarmnet start
      swarmnet start --model ./my-model
    """
    options.check()
    machine = options.machine.named()
    folder = own_household(machine.data_dir, name)
    entry = machine.enter(str(folder))
    event = {"event": "household", "swarm": entry.file.name, "path": str(folder)}
    text = f"the swarm {entry.file.name}: type `swarmnet join` on another computer in this network\nask it with `swarmnet run {options.model} --swarm {entry.file.name}`\nsee its computers and members with `swarmnet dashboard --swarm {entry.file.name}`"
    say(event, text, as_json=foreground.as_json)
    from swarmnet_protocols.joining.pairing import House

    house = House(
        entry.file.name,
        partial(invite_newcomer, folder),
        partial(show_code, as_json=foreground.as_json),
        partial(show_newcomer, as_json=foreground.as_json),
    )
    machine = replace(machine, issuer=machine.issuer or folder / KEY_NAME)
    host(entry, replace(options, machine=machine), foreground, house=house)
