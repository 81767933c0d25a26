"""The command line. torch, transformers, hivemind and grpc are imported only by commands that need
them."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from types import FrameType
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from swarmnet.cli.failures import EXIT_INTERRUPTED, explain
from swarmnet.cli.lazy import LazyCommand, LazyGroup
from swarmnet.cli.output import print_text
from swarmnet.logs import LogFormat, LogLevel, configure

COMMANDS = {
    "Try it": (LazyCommand("demo", "Start a swarm on this machine and ask it a question.", "demo.demo"),),
    "Use a model": (
        LazyCommand("run", "Answer one prompt, or chat."),
        LazyCommand("serve", "Serve an OpenAI-compatible endpoint.", "endpoint.serve"),
        LazyCommand("batch", "Answer a file of prompts while nobody waits.", "endpoint.batch"),
        LazyCommand("models", "List the models of a swarm, and their speed.", "endpoint.models"),
        LazyCommand("router", "Choose a model for each question: auto.", "endpoint.router:app"),
        LazyCommand("agent", "Start an agent, such as Claude Code, on a model.", "endpoint.agent"),
        LazyCommand("bench", "Measure what a swarm, or this machine, delivers."),
        LazyCommand("model", "Fetch and check model files.", "commands.model:app"),
    ),
    "Share this machine": (
        LazyCommand("start", "Start a swarm of the computers in this room."),
        LazyCommand("join", "Host a part of a model."),
        LazyCommand("volunteer", "Host or train, whichever the swarm needs more."),
        LazyCommand("status", "Show what the node on this machine is doing.", "commands.control"),
        LazyCommand("limits", "Show or change what the node may use, and when.", "commands.control"),
        LazyCommand("stats", "Show what this machine has given."),
        LazyCommand("pause", "Free the node's memory for a while.", "commands.control"),
        LazyCommand("resume", "Serve again after a pause.", "commands.control"),
        LazyCommand("finish", "Stop the node after its sessions have moved.", "commands.control"),
        LazyCommand("bootstrap", "Run a peer through which others enter the swarm."),
        LazyCommand("service", "Start a command with the machine, under systemd.", "commands.service:app"),
        LazyCommand("doctor", "Find what is wrong on this machine, and how to fix it."),
    ),
    "A swarm": (
        LazyCommand("swarm", "Create swarms and manage their members.", "commands.swarm.swarm:app"),
        LazyCommand("dashboard", "Show a swarm on a web page."),
    ),
    "Train": (
        LazyCommand("tune", "Fine-tune a model that runs on the swarm.", "training.tune"),
        LazyCommand("adapter", "Merge adapters.", "training.adapter:app"),
        LazyCommand("train", "Train a model together with others.", "training.train:app"),
    ),
}
"""All commands by section, in the order of ``--help``."""


class Commands(LazyGroup):
    sections = COMMANDS
    synonyms: ClassVar = {"chat": "run", "ask": "run", "generate": "run", "host": "join", "pull": "model"}


app = typer.Typer(
    cls=Commands,
    help="Run large models on a swarm of ordinary computers.",
    epilog="Start with `swarmnet demo`. `swarmnet COMMAND --help` explains each command.",
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from swarmnet.version import describe

        print_text(describe())
        raise typer.Exit


@app.callback()
def _options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print version, commit and kernels, and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Print without colours. So does NO_COLOR in the environment.")
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option("--log-format", envvar="SWARMNET_LOG_FORMAT", help="Format of log records.")
    ] = "text",
    log_level: Annotated[
        LogLevel,
        typer.Option(
            "--log-level",
            envvar="SWARMNET_LOG_LEVEL",
            help="Log records of this level and above go to stderr.",
        ),
    ] = "warning",
    native_target: Annotated[
        str, typer.Option(envvar="SWARMNET_NATIVE_TARGET", hidden=True, help="Best target of native code.")
    ] = "",
    _debug: Annotated[
        bool, typer.Option("--debug", hidden=True, help="Show the traceback of an error.")
    ] = False,
) -> None:
    if no_color:
        os.environ["NO_COLOR"] = "1"
    configure(log_format=log_format, level=log_level)
    if native_target:
        from swarmnet_protocols.machine.native_code import choose_target

        choose_target(native_target)


def execute(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors are printed to stderr as a message and a
    hint."""
    arguments = arguments or ["--help"]
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="swarmnet", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as end:  # click ends the process itself when it meets a closed pipe
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _reader_left()
    except Exception as error:  # noqa: BLE001 - the outermost handler
        if "--debug" in options:
            traceback.print_exc()
        failure = explain(error)
        failure.show(as_json="--json" in options)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _reader_left() -> int:
    """Replace stdout, whose reader has left: the interpreter would raise the error again when it
    flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_INTERRUPTED


def check_arguments(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Check a command line without running it, and return the values of its options.

    Raises ``typer.TyperException`` for an unknown command or option, or an invalid value.
    """
    command: Any = typer.main.get_command(app)
    name, rest, context = "swarmnet", list(arguments), None
    while True:
        given = list(rest)
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            values: Mapping[str, Any] = context.params
            return values
        _, rest, _ = command.make_parser(context).parse_args(given)
        name, command, rest = command.resolve_command(context, rest)


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line: the entry point of ``swarmnet``."""
    # How many iterations an OpenMP thread spins at the end of an operation before it sleeps. The
    # value is read when torch is imported. The other threads end within that time, unless another
    # process has displaced one. Then spinning longer would take the core that the displaced thread
    # needs.
    os.environ.setdefault("GOMP_SPINCOUNT", "300")
    for stream in (sys.stdout, sys.stderr):
        # an answer may have letters that the encoding of stdout lacks
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(execute(sys.argv[1:]))
