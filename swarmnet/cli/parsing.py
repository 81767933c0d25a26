"""Whether a command line would be understood, without running it."""

from collections.abc import Sequence
from typing import Any

import typer


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise what ``swarmnet`` raises for a command or an option it does not have, or a value of the wrong kind."""
    from swarmnet.cli import app

    command: Any = typer.main.get_command(app)
    name, rest, context = "swarmnet", list(arguments), None
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
