"""``swarmnet serve``: an OpenAI-compatible endpoint over a swarm."""

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.options import (
    BootstrapOption,
    CacheDirOption,
    DataDirOption,
    DraftOption,
    DtypeOption,
    HostOption,
    HostsOption,
    JsonFlag,
    MaxDiskOption,
    ModelOption,
    PortOption,
    SpeculateOption,
    SwarmOption,
    TransportOption,
    WireOption,
    check_draft,
    device_option,
)
from swarmnet.cli.output import note, print_json, progress, say
from swarmnet.paths import default_cache_dir
from swarmnet.swarm_file.entry import client_network
from swarmnet.swarm_file.keys import API_KEY, read_secret
from swarmnet.systemd import notify_ready, notify_stopping
from swarmnet_protocols.errors import ConfigError, NetworkStopped
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.joining.without_hub import resolve_in_swarm
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.machine.platform import allow_open_files
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel
from swarmnet_protocols.models.chat_template import prepare_rendering

if TYPE_CHECKING:
    from swarmnet.gateway.quotas import Quota
    from swarmnet.web.middleware import AccessPolicy, ApiKeys

DRAIN_S = 60.0
"""Seconds that running answers may take to end after the command is stopped."""
MAX_KEY_FILE_BYTES = 1 << 20
MAX_FILES = 65536
"""Limit on open files, raised from the usual 1024 because each HTTP connection takes one."""


_ORIGIN = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True)
class _Serving:
    """The options of an endpoint."""

    host: str
    port: int
    access: "AccessPolicy"
    quota: "Quota"
    max_concurrent: int
    dtype: str
    wire: str
    device: str
    speculate: bool
    draft: str
    as_json: bool
    stop_on_eof: bool = False


def serve(  # noqa: PLR0913 - a command line, not an interface
    *,
    swarm: SwarmOption,
    model: ModelOption = DEFAULT_MODEL,
    transport: TransportOption = "auto",
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    hosts: HostsOption,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key_file: Annotated[
        list[Path],
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help=f"Serve only requests with an API key from this file. A line is KEY or NAME:KEY. Or put one key into ${API_KEY}.",
        ),
    ] = [],  # noqa: B006
    cors: Annotated[
        list[str],
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let this page, app or extension use the endpoint: https://example.org, app://obsidian.md.",
        ),
    ] = [],  # noqa: B006
    allow_host: Annotated[
        list[str],
        typer.Option(
            "--allow-host", metavar="NAME", help="Host name under which browsers open it; repeatable."
        ),
    ] = [],  # noqa: B006
    max_concurrent: Annotated[
        int,
        typer.Option(
            "--max-concurrent", metavar="N", min=1, max=1024, help="Compute this many answers at a time."
        ),
    ] = 32,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            "--requests-per-minute",
            metavar="N",
            min=1,
            help="Requests per minute for each API key; n choices count as n requests.",
        ),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-minute",
            metavar="N",
            min=1,
            help="Tokens per minute for each API key: prompts (once for each choice) and answers.",
        ),
    ] = None,
    concurrent: Annotated[
        int | None,
        typer.Option("--concurrent", metavar="N", min=1, help="Answers at a time for each API key."),
    ] = None,
    device: Annotated[str, device_option("Device of embeddings and head.")] = "auto",
    dtype: DtypeOption = "auto",
    wire: WireOption = "auto",
    speculate: SpeculateOption = True,
    draft: DraftOption = "",
    data_dir: DataDirOption = None,
    cache_dir: CacheDirOption = None,
    max_disk_bytes: MaxDiskOption = None,
    as_json: JsonFlag = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Serve a model that runs on the swarm as an OpenAI-compatible endpoint, until Ctrl-C.

    All callers share one client of the swarm. An endpoint that only this machine reaches needs no
    key.
    """
    from swarmnet.gateway.quotas import Quota
    from swarmnet.web.middleware import AccessPolicy, check_exposed
    from swarmnet.web.server import listen

    check_draft(draft, speculate=speculate)
    keys = _keys(api_key_file)
    check_exposed(host, keys)
    listen(host, port).close()  # reports an address in use before the swarm is searched
    access = AccessPolicy(keys, [host, *allow_host], [check_origin(each) for each in cors], ["/health"])
    quota = Quota(requests_per_minute, tokens_per_minute, concurrent)
    network = client_network(swarm, bootstrap, data_dir, hosts)
    with progress(quiet=as_json) as report:
        import_transformers()
        local = resolve_in_swarm(
            model,
            lambda: network,
            cache_dir=cache_dir or default_cache_dir(),
            progress=report,
            max_disk_bytes=max_disk_bytes,
        )
    serving = _Serving(
        host, port, access, quota, max_concurrent, dtype, wire, device, speculate, draft, as_json, stop_on_eof
    )
    prepare_rendering()
    allow_open_files(MAX_FILES)
    run_until_stopped(_serve(local, network, serving))


def check_origin(text: str) -> str:
    """Return an origin as clients send it: of a page, or with a scheme of its own of an app or
    extension."""
    found = _ORIGIN.fullmatch(text)
    if found is None or int(found["port"] or 0) > 65535:
        raise typer.BadParameter(
            f"{text!r} is not an origin: it looks like https://example.org or app://obsidian.md, "
            "with a port if it has one, and no *",
            param_hint="'--cors'",
        )
    scheme, host, port = found["scheme"].lower(), found["host"], found["port"]
    # browsers write only these in lower case and without the usual port
    if scheme in _DEFAULT_PORTS:
        host = host.lower()
        port = None if port == _DEFAULT_PORTS[scheme] else port
    return f"{scheme}://{host}" + (f":{port}" if port else "")


def _keys(files: Sequence[Path]) -> "ApiKeys":
    """The API keys of the environment and of ``files``. A key without a name is named after its
    file and line."""
    from swarmnet.web.middleware import ApiKeys

    keys = {API_KEY: key} if (key := os.environ.get(API_KEY)) else {}
    for path in files:
        lines = read_secret(path, MAX_KEY_FILE_BYTES).splitlines()
        named = [
            _named(line, f"{path.name}:{number}") for number, line in enumerate(lines, 1) if _is_key(line)
        ]
        if not named:
            raise ConfigError(f"there is no key in {path}", hint="write one on each line: KEY or NAME:KEY")
        for name, key in named:
            if keys.setdefault(name, key) != key:
                raise ConfigError(
                    f"{path} has another key called {name}", hint="give every key a name of its own"
                )
    return ApiKeys(keys)


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _named(line: str, place: str) -> tuple[str, str]:
    """The name and key of a line ``NAME:KEY``; for a line ``KEY`` the name is ``place``."""
    name, colon, key = line.strip().partition(":")
    return (name, key) if colon else (place, name)


async def _serve(local: LocalModel, network: Network, serving: _Serving) -> None:
    from swarmnet.gateway.app import Gateway
    from swarmnet.web.middleware import protect
    from swarmnet.web.server import serve_http
    from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
    from swarmnet_client.hosts.model_hosts import ModelHosts
    from swarmnet_client.model.local_layers import LoadOptions, memory_notice
    from swarmnet_protocols.machine.aio import race

    interrupts = Interrupts.catch()
    if serving.stop_on_eof:
        interrupts.catch_end_of(sys.stdin)
    stop = asyncio.Event()
    options = LoadOptions.picked(serving.dtype, serving.device, only_generates=True, wire=serving.wire)
    if text := memory_notice(local, options):
        say({"event": "notice", "text": text}, text, as_json=serving.as_json)
    options = replace(options, draft=serving.draft)
    limits = BatchLimits(active=serving.max_concurrent, waiting=serving.max_concurrent)
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(ModelHosts.connect(local, network))
        served = await stack.enter_async_context(
            BatchedModel.open(local, hosts, options, limits, speculate=serving.speculate)
        )
        gateway = Gateway(served, serving.quota)
        stack.callback(gateway.close)
        app = protect(gateway.app(), serving.access, max_body_bytes=gateway.parser.max_bytes)
        endpoint = await stack.enter_async_context(serve_http(app, serving.host, serving.port))
        interrupts.first = stop.set
        _announce(endpoint.url, gateway.model, serving)
        await race(stop.wait(), hosts.transport.died(), endpoint.failed())
        notify_stopping()
        if not stop.is_set():
            raise NetworkStopped
        draining = "stopping: running answers are finished; Ctrl-C again stops at once"
        say({"event": "draining"}, draining, as_json=serving.as_json)
        try:
            async with asyncio.timeout(DRAIN_S):
                await gateway.drain()
        except TimeoutError:
            cut_off = f"answers still ran after {DRAIN_S:g} s; they are cut off"
            say({"event": "cut_off"}, cut_off, as_json=serving.as_json)
    say({"event": "stopped"}, "stopped", as_json=serving.as_json)


def _announce(url: str, model: str, serving: _Serving) -> None:
    notify_ready(f"{model} at {url}")
    if serving.as_json:
        print_json({"event": "ready", "url": url, "model": model})
        return
    asks = "" if serving.access.keys else ", for this machine only; no key is asked for"
    note(f"serving {model} at {url}/v1{asks}")
    note(f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'YOUR KEY' if serving.access.keys else 'none'}")
    note("stop with Ctrl-C")
