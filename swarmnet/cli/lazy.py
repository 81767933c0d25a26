"""Commands that are imported when they are called, and help in sections."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from swarmnet.cli.option_groups import command_for_typer

_SUMMARY_CHARS = 160


class Group(TyperGroup):
    """A group of commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help" in args and not args[0].startswith("-"):
            # A group's help needs no options. To parse them, typer would import pydantic, which
            # takes a third of the time.
            self.params, self.add_help_option = [], False
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = self.commands.items()
        _write_sections(
            formatter, (("Commands", (name, each.get_short_help_str(_SUMMARY_CHARS))) for name, each in shown)
        )


def command_group(about: str) -> typer.Typer:
    """Return an app for a group of commands, such as `swarmnet swarm`."""
    return typer.Typer(cls=Group, help=about, add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class LazyCommand:
    """A command as `swarmnet --help` lists it.

    ``target``: the module of its function in ``swarmnet.cli``, with ``:name`` if the function has
    another name or is a ``typer.Typer``. Empty for a module of ``commands`` with the name of the
    command.
    """

    name: str
    summary: str
    target: str = ""

    def load(self) -> Any:
        module, _, name = (self.target or f"commands.{self.name}").partition(":")
        target = getattr(import_module(f"swarmnet.cli.{module}"), name or self.name)
        if not isinstance(target, typer.Typer):
            function, target = target, command_group("")
            target.command(self.name)(function)
        for command in target.registered_commands:
            if command.cls is not SectionedCommand and command.callback is not None:
                command.cls, command.callback = SectionedCommand, command_for_typer(command.callback)
        return typer.main.get_command(target)


class LazyGroup(Group):
    """Shows its commands by section without importing any.

    A subclass sets ``sections``, and ``synonyms``: what other programs call a command.
    """

    sections: ClassVar[Mapping[str, tuple[LazyCommand, ...]]] = {}
    synonyms: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._lazy = {each.name: each for commands in self.sections.values() for each in commands}
        self.commands = {
            name: TyperCommand(name, short_help=each.summary) for name, each in self._lazy.items()
        }

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._lazy[cmd_name].load() if cmd_name in self._lazy else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except TyperException as error:
            if meant := self.synonyms.get(args[0]):
                vars(error)["possibilities"] = [meant]
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        listed = self.sections.items()
        _write_sections(
            formatter, ((name, (each.name, each.summary)) for name, commands in listed for each in commands)
        )


class SectionedCommand(TyperCommand):
    """Shows options in sections by their ``rich_help_panel``. Errors in its arguments name the
    command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except TyperException as error:
            if getattr(error, "ctx", ctx) is None:
                vars(error)["ctx"] = ctx
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        return [self.options_metavar or "", *map(_name_of, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = ((each, each.get_help_record(ctx)) for each in self.get_params(ctx))
        _write_sections(
            formatter,
            (
                (_section(each), (_name_of(each), row[1]) if each.param_type_name == "argument" else row)
                for each, row in rows
                if row is not None
            ),
        )


def _name_of(argument: Any) -> str:
    """Return the name of an argument in a usage line: in brackets if it is optional, without the
    braces and type that typer adds."""
    name = str(getattr(argument, "metavar", None) or argument.name).strip("[]")
    name += "..." if argument.nargs != 1 and not name.endswith("...") else ""
    return name if argument.required else f"[{name}]"


def _section(parameter: Any) -> str:
    kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
    return getattr(parameter, "rich_help_panel", None) or kind


def _write_sections(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for section, row in rows:
        sections[section].append(row)
    for section, lines in sections.items():
        with formatter.section(section):
            formatter.write_dl(lines)
