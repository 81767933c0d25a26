"""The options of `swarmnet serve`, and how their text is read."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet import units
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import (
    AllowHostOption,
    DraftOption,
    DtypeOption,
    HostOption,
    JsonFlag,
    PortOption,
    SpeculateOption,
    StopOnEofFlag,
    WireOption,
    check_at_least_zero,
    device_option,
)
from swarmnet.resident import KEY_NAME
from swarmnet.swarm_file.keys import API_KEY, read_secret
from swarmnet_protocols.errors import ConfigError

if TYPE_CHECKING:
    from swarmnet.gateway.routing.router import Router
    from swarmnet.web.middleware import AccessPolicy, ApiKeys

MAX_KEY_FILE_BYTES = 1 << 20
_ORIGIN = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_ADAPTERS = 16
"""Most adapters of one endpoint. A host keeps as many for one client."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """The options of the endpoint: its address, its users and their quotas, and how it computes."""

    host: HostOption = "127.0.0.1"
    port: PortOption = 8000
    api_key_file: Annotated[
        list[Path],
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help=f"Serve only requests with an API key from this file. A line is KEY or NAME:KEY. Or put one key into ${API_KEY}.",
        ),
    ] = field(default_factory=list)
    cors: Annotated[
        list[str],
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let this page, app or extension use the endpoint: https://example.org, app://obsidian.md.",
        ),
    ] = field(default_factory=list)
    allow_host: AllowHostOption = field(default_factory=list)
    max_concurrent: Annotated[
        int,
        typer.Option(
            "--max-concurrent",
            metavar="N",
            min=1,
            max=1024,
            help="Compute this many answers of a model at a time.",
        ),
    ] = 32
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            "--requests-per-minute",
            metavar="N",
            min=1,
            help="Requests per minute for each API key; n choices count as n requests.",
        ),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-minute",
            metavar="N",
            min=1,
            help="Tokens per minute for each API key: prompts (once for each choice) and answers.",
        ),
    ] = None
    concurrent: Annotated[
        int | None,
        typer.Option("--concurrent", metavar="N", min=1, help="Answers at a time for each API key."),
    ] = None
    max_memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="Memory for the embeddings, heads and adapters of open models, without --model. The least recently used close for others.",
            show_default="a quarter of this machine's",
        ),
        From(str, units.parse_size_bytes),
    ] = None
    device: Annotated[str, device_option("Device of embeddings and head.")] = "auto"
    dtype: DtypeOption = "auto"
    wire: WireOption = "auto"
    speculate: SpeculateOption = True
    draft: DraftOption = ""
    adapter: Annotated[
        list[str],
        typer.Option(
            "--adapter",
            metavar="[MODEL:]NAME=DIR",
            help="Also offer a model with this LoRA adapter, as MODEL:NAME. With --model M: law=tuned/law. "
            "Without: M:law=tuned/law. Repeat it for more adapters.",
        ),
    ] = field(default_factory=list)
    router: Annotated[
        Path | None,
        typer.Option(
            "--router",
            metavar="FILE",
            help="Also offer the model auto: this router, which `swarmnet router fit` made, chooses a model for each question.",
            dir_okay=False,
        ),
    ] = None
    router_cost: Annotated[
        float,
        typer.Option(
            "--router-cost",
            metavar="X",
            help="With more, auto chooses faster models more often. 0: the best model. `router fit` prints what each X buys.",
        ),
    ] = 0.0
    as_json: JsonFlag = False
    stop_on_eof: StopOnEofFlag = False
    demo: Annotated[bool, typer.Option("--demo", hidden=True)] = False
    """True if the page has a button that kills a host: `swarmnet demo` waits for the event."""

    def access(self, own_key: str) -> "AccessPolicy":
        """Return the access rules of the endpoint. ``own_key``: the secret of this user's commands.

        Raises ``ConfigError`` if other machines reach it without a key, or if a key or an origin is
        invalid.
        """
        from swarmnet.gateway.page import PUBLIC_PATHS
        from swarmnet.web.middleware import AccessPolicy, check_exposed

        keys = _keys(self.api_key_file)
        check_exposed(self.host, keys)
        if keys:
            keys = _keys(self.api_key_file, {KEY_NAME: own_key})
        origins = [check_origin(each) for each in self.cors]
        return AccessPolicy(keys, [self.host, *self.allow_host], origins, PUBLIC_PATHS)


def adapter_folders(given: Sequence[str], model: str = "") -> dict[str, dict[str, Path]]:
    """Return the directories of adapters by model and name. ``model``: the only model, if the
    endpoint has one; adapters are then under ""."""
    folders: dict[str, dict[str, Path]] = {}
    for text in given:
        label, _, folder = text.partition("=")
        changed, _, name = label.rpartition(":")
        if not _ADAPTER_NAME.fullmatch(name) or not folder:
            message = f"{text!r} is not NAME=DIR, as in law=tuned/law; a name has letters, digits, . _ -"
            raise typer.BadParameter(message, param_hint="'--adapter'")
        if bool(changed) == bool(model):
            message = "name the model of an adapter once: with --model M, or as in M:law=tuned/law"
            raise typer.BadParameter(message, param_hint="'--adapter'")
        if name in folders.setdefault(changed, {}):
            raise typer.BadParameter(f"two adapters are called {name}", param_hint="'--adapter'")
        folders[changed][name] = Path(folder)
    if len(given) > MAX_ADAPTERS:
        raise typer.BadParameter(f"{MAX_ADAPTERS} are the most", param_hint="'--adapter'")
    return folders


def read_router(options: EndpointOptions, model: str) -> "Router | None":
    """Read the router of an endpoint, if it has one. Raises ``ConfigError`` for a bad file."""
    from swarmnet.gateway.routing.router import Router

    price = check_at_least_zero(options.router_cost, option="--router-cost")
    if options.router is None:
        if price:
            raise typer.BadParameter("name the router, too: --router FILE", param_hint="'--router-cost'")
        return None
    if model and not options.adapter:
        message = "it chooses between models: leave out --model, or add an --adapter"
        raise typer.BadParameter(message, param_hint="'--router'")
    return Router.read(options.router, price)


def check_origin(text: str) -> str:
    """Return an origin as clients send it. Apps and extensions have schemes of their own."""
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


def _keys(files: Sequence[Path], others: Mapping[str, str] = MappingProxyType({})) -> "ApiKeys":
    """Return the API keys of the environment and of ``files``, and ``others``. A key without a name
    is named after its file and line."""
    from swarmnet.web.middleware import ApiKeys

    keys = dict(others) | ({API_KEY: key} if (key := os.environ.get(API_KEY)) else {})
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
    """Return the name and key of a line ``NAME:KEY``; for a line ``KEY`` the name is ``place``."""
    name, colon, key = line.strip().partition(":")
    return (name, key) if colon else (place, name)
