"""``swarmnet service``: makes systemd start a swarmnet command with the machine."""

from typing import Annotated

import typer

from swarmnet.cli import check_arguments
from swarmnet.cli.lazy import command_group
from swarmnet.cli.options import JsonFlag
from swarmnet.cli.output import note, print_json, print_result, print_table, print_text
from swarmnet.swarm_file.entry import check_known
from swarmnet.systemd import Service, unit_text
from swarmnet_protocols.errors import ConfigError

RUN_FOR_LONG = ("start", "join", "bootstrap", "serve", "dashboard", "train join")
NODE_UNIT = "swarmnet"
"""The unit of a node. Every other command has a unit of its own, so that a machine can run both."""
app = command_group("Start a command with the machine, under systemd.")

SystemFlag = Annotated[
    bool, typer.Option("--system/--user", help="Run as a unit of the machine (needs root) or of this user.")
]
NameOption = Annotated[
    str, typer.Option("--name", metavar="NAME", help="Name of the unit, as `service install` printed it.")
]


@app.command("install", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def install(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="The command to run, such as: join lab/swarm.toml --num-blocks 10"
        ),
    ],
    *,
    is_system: SystemFlag = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the unit.", show_default="swarmnet, or swarmnet-COMMAND"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the unit file and change nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Let systemd run `swarmnet COMMAND` now and whenever this machine starts. Options of install
    come before COMMAND.

    Relative paths refer to the current directory. If the install fails, nothing is changed.

    \b
    Examples:
      swarmnet service install join lab/swarm.toml --num-blocks 10
      swarmnet service install bootstrap lab/swarm.toml --metrics 9401
    """
    kind = _check(command, is_system=is_system)
    service = Service(name or _usual_name(kind), is_system)
    text = unit_text(command, is_system=is_system)
    if dry_run:
        print_text(text, end="")
        return
    service.install(text)
    scope = "" if is_system else "--user "
    text = f"{service.path}\n  see it:  systemctl {scope}status {service.name}\n  its log: journalctl {scope}-u {service.name} -f"
    print_result({"unit": service.unit, "path": str(service.path)}, text, as_json=as_json)
    if not is_system:
        note("to have it run while you are not logged in: loginctl enable-linger")


@app.command("uninstall")
def uninstall(
    *, is_system: SystemFlag = False, name: NameOption = NODE_UNIT, as_json: JsonFlag = False
) -> None:
    """Stop the service and remove its unit. Keys and models stay."""
    service = Service(name, is_system)
    service.uninstall()
    print_result({"removed": str(service.path)}, f"removed {service.path}", as_json=as_json)


@app.command("status")
def status(*, is_system: SystemFlag = False, name: NameOption = NODE_UNIT, as_json: JsonFlag = False) -> None:
    """Print the state of the service, as systemd reports it."""
    service = Service(name, is_system)
    shown = service.status()
    if as_json:
        print_json(shown)
    else:
        print_table(service.unit, shown)


def _usual_name(kind: str) -> str:
    return NODE_UNIT if kind in {"join", "start"} else f"{NODE_UNIT}-{kind.replace(' ', '-')}"


def _check(command: list[str], *, is_system: bool) -> str:
    """Return the name of the command in the command line ``command``.

    Raises an error if that command would end at once: systemd would have a unit that never runs.
    """
    from swarmnet_protocols.membership.invites import is_invite

    kind = next((each for each in RUN_FOR_LONG if command[: len(each.split())] == each.split()), None)
    if kind is None:
        raise typer.BadParameter(
            f"{command[0]!r} is not a service: give one of {', '.join(RUN_FOR_LONG)}",
            param_hint="'COMMAND'",
        )
    given = check_arguments(command)
    if any(is_invite(text) for argument in command for text in (argument, argument.partition("=")[2])):
        raise ConfigError(
            "a unit may be read by all users of the machine, and an invite is a secret",
            hint="redeem it once with `swarmnet join INVITE`, then install the service with the swarm's name",
        )
    if kind == "train join" and not given["yes"]:
        raise typer.BadParameter("a service cannot be asked for consent: add --yes", param_hint="'--yes'")
    if given.get("swarm") and not is_system:  # a unit of the machine may run as another user
        check_known(given["swarm"], given["data_dir"])
    return kind
