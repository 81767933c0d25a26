"""``swarmnet batch``: answers the prompts of a file, and can be continued."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.options import DtypeOption, JsonFlag, ModelOption, SwarmOption, WireOption, device_option
from swarmnet.cli.output import note, print_json, progress
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.units import counted
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from swarmnet.gateway.batches.answering import LineAnswerer
    from swarmnet_client.model.load_options import LoadOptions
    from swarmnet_protocols.joining.network import Network
    from swarmnet_protocols.models import LocalModel

FAILED = 1
"""Exit code if a line was answered with an error."""


def batch(  # noqa: PLR0913 - a command line, not an interface
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS.jsonl",
            help='A request on each line: {"prompt": TEXT}, {"messages": [...]}, or as in OpenAI\'s batches.',
            show_default=False,
            dir_okay=False,
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="ANSWERS.jsonl",
            help="Append the answers to this file. Answers that it has already are not computed again.",
            show_default=False,
            dir_okay=False,
        ),
    ],
    swarm: SwarmOption,
    model: ModelOption = DEFAULT_MODEL,
    at_once: Annotated[
        int,
        typer.Option("--at-once", metavar="N", min=1, max=1024, help="Compute this many answers at a time."),
    ] = 32,
    device: Annotated[str, device_option("Device of embeddings and head.")] = "auto",
    dtype: DtypeOption = "auto",
    wire: WireOption = "auto",
    client: ClientOptions,
    as_json: JsonFlag = False,
) -> None:
    """Answer the prompts of a file while nobody waits for them.

    Hosts compute them in the time that other work leaves. A stopped command is continued by the
    same command. Answers come as OpenAI's batches have them, in the order in which they end.

    \b
    Example:
      swarmnet batch prompts.jsonl --out answers.jsonl --swarm lab/swarm.toml
    """
    from swarmnet.gateway.batches.journal import Journal
    from swarmnet.gateway.batches.lines import checked_ids, read_lines
    from swarmnet_client.model.load_options import LoadOptions
    from swarmnet_protocols.models.text.chat_template import prepare_rendering

    if prompts.exists() and not prompts.is_file():
        raise ConfigError(
            f"{prompts} is no plain file", hint="write the prompts into a file: they are read twice"
        )
    read = partial(read_lines, prompts, model)
    ids = checked_ids(read())
    network = client.network(swarm)
    with Journal.open(out, ids) as journal:
        kept, began = len(journal.ids), time.monotonic()
        if kept < len(ids):
            prepare_rendering()
            load = LoadOptions.picked(dtype, device, only_generates=True, wire=wire)
            with progress(quiet=as_json) as report:

                def show() -> None:
                    report("answers", len(journal.ids), len(ids))
                    if as_json:
                        print_json({"event": "answers", "done": len(journal.ids), "total": len(ids)})

                local = client.resolve(model, network, report)

                async def answer() -> None:
                    from swarmnet.gateway.batches.answering import answer_lines

                    Interrupts.catch()
                    async with _answerer(local, network, load, at_once) as answerer:
                        show()
                        await answer_lines(read, journal, answerer, at_once, show)

                try:
                    run_until_stopped(answer())
                except KeyboardInterrupt:
                    note(f"stopped with {len(journal.ids)} of {len(ids)} answers: the same command continues")
                    raise
        took_s = time.monotonic() - began
        answers = {"completed": journal.completed, "failed": journal.failed, "kept": kept}
    if as_json:
        print_json({"event": "done", **answers, "seconds": round(took_s, 3), "out": str(out)})
    else:
        failed = f", {answers['failed']} of them errors (response.body.error)" if answers["failed"] else ""
        note(f"{counted(len(ids), 'answer')} in {out}{failed}; {len(ids) - kept} computed in {took_s:.0f} s")
    if answers["failed"]:
        raise typer.Exit(FAILED)


@asynccontextmanager
async def _answerer(
    local: "LocalModel", network: "Network", load: "LoadOptions", at_once: int
) -> "AsyncIterator[LineAnswerer]":
    """Open the model on the swarm while the context is open."""
    from swarmnet.gateway.app import Gateway
    from swarmnet.gateway.models import ModelTable
    from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
    from swarmnet_client.hosts.model_hosts import ModelHosts

    limits = BatchLimits(active=at_once, waiting=at_once)
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(ModelHosts.connect(local, network))
        served = await stack.enter_async_context(BatchedModel.open(local, hosts, load, limits))
        gateway = Gateway(await stack.enter_async_context(ModelTable.of(served)))
        yield gateway.line_answerer(gateway.accounts[""], asyncio.Semaphore(at_once))
