"""The command line. Nothing heavy (torch, transformers, hivemind, grpc) is imported before a command needs it."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from swarmnet.cli import control, demo, join, model, run, swarm, train, tune
from swarmnet.cli.failures import EXIT_INTERRUPTED, explain

app = typer.Typer(
    help="Run large models on a swarm of ordinary computers.", add_completion=False, rich_markup_mode=None
)
app.command("demo")(demo.demo)
app.add_typer(swarm.app, name="swarm")
app.command("join")(join.join)
app.command("run")(run.run)
app.command("tune")(tune.tune)
app.command("status")(control.status)
app.command("finish")(control.finish)
app.add_typer(model.app, name="model")
app.add_typer(train.app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"swarmnet {version('swarmnet-p2p')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", hidden=True, help="Show the traceback of an error.")
    ] = False,
) -> None:
    pass


def execute(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Every error ends here, as one message with a next step."""
    arguments = arguments or ["--help"]
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="swarmnet", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; without this the interpreter complains once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last supervisor: what nobody else handled
        if "--debug" in options:
            traceback.print_exc()
        failure = explain(error)
        failure.show(as_json="--json" in options)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """The entry point of ``swarmnet``."""
    # How long an OpenMP thread spins before it sleeps, to be set before torch is imported: long enough to span the gap
    # between two operations of one forward (asleep in between, decoding takes twice as long), too short to be felt
    # by the other processes of the machine when the forward is over.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(execute(sys.argv[1:]))
