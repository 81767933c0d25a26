"""``swarmnet agent``: an agent that uses a model of a swarm.

1. The command finds an endpoint of this user on this machine, or starts one.
2. The agent gets the endpoint's address and model, in its environment or as arguments.
3. The agent runs in this terminal. Its exit code is the command's, and an endpoint that was started
   ends with it.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from swarmnet.cli.endpoint.agent_programs import AGENTS, Agent, Served
from swarmnet.cli.options import ENTERED, JsonFlag
from swarmnet.cli.output import note, print_json
from swarmnet.resident import Resident, find
from swarmnet_protocols.errors import ConfigError, SwarmnetError, Unreachable

ASK_S = 10.0
"""Seconds within which a running endpoint must list its models."""
MAX_LIST_BYTES = 1 << 20
"""Most bytes that are read of the endpoint's list of models."""
STOP_S = 5.0
"""Seconds until an endpoint that this command started is killed. Nobody waits for its answers."""


def agent(
    name: Annotated[
        str, typer.Argument(metavar="|".join(AGENTS), help="The agent to start.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="The agent's own arguments.", show_default=False),
    ] = None,
    *,
    swarm: Annotated[
        str | None,
        typer.Option("--swarm", metavar="SWARM", help=ENTERED, show_default="that of a running endpoint"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="The model to use. With --swarm, the model to serve, as for `serve`.",
            show_default="the model with the longest context",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start an agent that uses a model of a swarm.

    The agent uses an endpoint that you run on this machine (`demo --keep`, `serve`, `join
    --serve`). With --swarm, the command starts an endpoint, and stops it when the agent ends.
    """
    if (known := AGENTS.get(name)) is None:
        names = ", ".join(AGENTS)
        raise typer.BadParameter(f"{name!r} is unknown: use one of {names}", param_hint="'NAME'")
    program = shutil.which(known.program)
    if program is None:
        raise ConfigError(f"{known.program} is not installed", hint=known.install)
    with _endpoint(swarm, model) as resident:
        served = _served(resident, "" if swarm else model or "")
        if as_json:
            print_json({"event": "agent", "program": program, "url": served.url, "model": served.model})
        else:
            note(f"{name} uses {served.model} at {served.url}")
        _warn(name, known, served)
        code = _run(program, known, served, arguments or [])
    raise typer.Exit(code)


def _warn(name: str, known: Agent, served: Served) -> None:
    if served.context < known.tokens:
        note(
            f"{served.model} takes {served.context} tokens, and the instructions and tools of {name} are "
            f"an estimated {known.tokens}: shorten them (docs/guides/agents.md), or use another model"
        )


def _run(program: str, known: Agent, served: Served, arguments: list[str]) -> int:
    setup = known.setup(served)
    environment = {**setup.defaults, **os.environ, **setup.environment}
    kept = {name: value for name, value in environment.items() if value is not None}
    process = subprocess.Popen([program, *setup.arguments, *arguments], env=kept)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the agent got the signal, too, and decides what to do
            continue
        return code if code >= 0 else 128 - code  # as a shell tells that a signal ended it


@contextmanager
def _endpoint(swarm: str | None, model: str | None) -> Iterator[Resident]:
    """Yield a running endpoint of this user. With ``swarm``, start one for as long as the context
    is open."""
    if swarm is None:
        if (running := find()) is None:
            raise ConfigError(
                "no endpoint of yours runs on this machine",
                hint="start one in another terminal: `swarmnet demo --keep`; or name a swarm: --swarm SWARM",
            )
        yield running
        return
    note("starting an endpoint; the first time, its part of the model is fetched")
    command = [sys.executable, "-m", "swarmnet", "serve", "--swarm", swarm, "--port", "0", "--json"]
    command += ["--stop-on-eof", *(("--model", model) if model else ())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        url = _ready(process)
        if (started := find(url=url)) is None:
            raise SwarmnetError("the endpoint stopped at once", hint=f"try `swarmnet serve --swarm {swarm}`")
        yield started
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _ready(process: "subprocess.Popen[bytes]") -> str:
    """Return the URL of a starting endpoint. Raises ``SwarmnetError`` if the start fails."""
    for line in process.stdout or ():
        event: dict[str, Any] = json.loads(line)
        if event.get("event") == "ready":
            return str(event["url"])
        if event.get("event") == "error":
            raise SwarmnetError(str(event["message"]), hint=str(event["hint"]))
    raise SwarmnetError("the endpoint stopped before it was ready", hint="`swarmnet serve` tells why")


def _served(resident: Resident, name: str) -> Served:
    """Ask an endpoint for the model ``name``.

    If it is the name of a job, the agent gets each newer revision, too. Without a name, return the
    model with the longest context, because agents send long instructions. Raises ``Unreachable`` or
    ``ConfigError``.
    """
    path = f"/v1/models/{quote(name)}" if name else "/v1/models"
    hint = "`swarmnet models --swarm SWARM` lists the models and what they lack"
    try:
        with closing(http.client.HTTPConnection(urlsplit(resident.url).netloc, timeout=ASK_S)) as connection:
            connection.request("GET", path, headers={"authorization": f"Bearer {resident.key}"})
            response = connection.getresponse()
            answer = json.loads(response.read(MAX_LIST_BYTES))
        if response.status != http.client.OK:
            kind = ConfigError if response.status == http.client.NOT_FOUND else Unreachable
            raise kind(f"the endpoint at {resident.url}: {answer['error']['message']}", hint=hint)
        listed = [answer] if name else answer["data"]
        usable = [each for each in listed if each["available"] and each["max_model_len"]]
        if not usable:
            lacking = f"the model {name!r} does not answer" if name else "no model answers"
            raise Unreachable(f"{lacking} at the endpoint {resident.url} now", hint=hint)
        found = max(usable, key=lambda each: int(each["max_model_len"]))
        return Served(resident.url, resident.key, name or str(found["id"]), int(found["max_model_len"]))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise Unreachable(
            f"the endpoint at {resident.url} does not list its models: {error}",
            hint="look at the terminal in which it runs",
        ) from error
