"""``swarmnet dashboard``: a web page that shows a swarm, served by this command or by a node."""

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet import swarm_file
from swarmnet.cli.foreground import DASHBOARD_FOLDER, HOW_TO_STOP, controlled, monitoring
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.options import (
    AllowHostOption,
    BootstrapOption,
    DataDirOption,
    HostOption,
    JsonFlag,
    MetricsOption,
    PortOption,
    SwarmOption,
    TransportOption,
)
from swarmnet.cli.output import note, print_json, print_text, progress, say
from swarmnet.paths import locked_data_dir
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet.swarm_file.household import started_here
from swarmnet.swarm_file.keys import API_KEY, KEY_NAME, read_secret
from swarmnet.systemd import notify_ready, notify_stopping
from swarmnet_protocols.errors import ConfigError, NetworkStopped
from swarmnet_protocols.joining.network import client_listen

if TYPE_CHECKING:
    from swarmnet.web.middleware import AccessPolicy
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.wire.control_pb2 import NodeStatus

HISTORY = "history"
MAX_KEY_BYTES = 4096
_RESTART = "start it again: swarmnet dashboard"


def dashboard(  # noqa: PLR0913 - a command line, not an interface
    *,
    swarm: SwarmOption,
    transport: TransportOption = "auto",
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help=f"File with the key that visitors need, or ${API_KEY}; browsers ask for it as a password.",
        ),
    ] = None,
    allow_host: AllowHostOption = [],  # noqa: B006
    data_dir: DataDirOption,
    metrics: MetricsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a swarm on a web page until `swarmnet finish` or Ctrl-C: its hosts and blocks, their
    speed, training jobs, and which blocks lack hosts.

    The data directory keeps a history of 30 days.
    """
    access = page_access((host, port), _key_in(api_key_file) or os.environ.get(API_KEY), allow_host)
    entry = enter(swarm, data_dir, bootstrap, as_client=True)
    entry.check_bootstrap()
    with locked_data_dir(data_dir / DASHBOARD_FOLDER) as directory:
        run_until_stopped(_show(entry, directory, (host, port), access, metrics, as_json=as_json))


def _key_in(path: Path | None) -> str | None:
    if path is None:
        return None
    key = read_secret(path, MAX_KEY_BYTES).strip()
    if not key:
        raise ConfigError(f"there is no key in {path}", hint="write one into it")
    return key


async def _show(
    entry: Entry,
    directory: Path,
    address: tuple[str, int],
    access: "AccessPolicy",
    metrics: tuple[str, int] | None,
    *,
    as_json: bool,
) -> None:
    from swarmnet.dashboard.metrics import SwarmCollector
    from swarmnet.dashboard.observing.polling import ObserverDependencies
    from swarmnet.dashboard.server import run_dashboard
    from swarmnet_node.owner.watched_peer import Purpose, WatchedPeer
    from swarmnet_protocols.joining.network import connect
    from swarmnet_protocols.machine.aio import race

    interrupts = Interrupts.catch()
    network = entry.network(client_listen(entry.addresses))
    async with AsyncExitStack() as stack:
        monitor = await stack.enter_async_context(monitoring(metrics, as_json=as_json))
        with progress(quiet=as_json) as report:
            report("finding the swarm", 0, None)
            transport, known = await stack.enter_async_context(connect(network, client_mode=True))
        dependencies = ObserverDependencies(transport, known)
        endpoint, feed = await stack.enter_async_context(
            run_dashboard(
                dependencies,
                entry,
                directory / HISTORY,
                address,
                access,
                owners_lists(entry, directory.parent, access),
            )
        )

        def add_url(status: "NodeStatus") -> None:
            status.url = endpoint.url

        purpose = Purpose("dashboard", entry.file.name, directory, network.peer.link, add_url)
        peer = await stack.enter_async_context(WatchedPeer(purpose, transport, known).running())
        swarm_metrics = SwarmCollector(lambda: feed.now.body)
        await stack.enter_async_context(controlled(peer, directory, monitor, swarm_metrics))
        interrupts.first = peer.stopping.set
        notify_ready(f"dashboard of {entry.file.name} on {endpoint.url}")
        if as_json:
            print_json({"event": "ready", "url": endpoint.url})
        else:
            print_text(f"the swarm {entry.file.name}: {endpoint.url}")
            note(HOW_TO_STOP)
        await race(peer.stopping.wait(), transport.died(), endpoint.failed())
        notify_stopping()
        if not peer.stopping.is_set():
            raise NetworkStopped(hint=_RESTART)
    say({"event": "stopped"}, "stopped", as_json=as_json)


def owners_lists(
    entry: Entry, data_dir: Path, access: "AccessPolicy"
) -> "Callable[[], Mapping[str, object]] | None":
    """Return the function that lists members and open invites for the owner of the swarm, with an
    issuer's records in ``data_dir``. None for other people, and for a page that may be public."""
    source = entry.source or started_here(data_dir, entry.file)
    if source is None or entry.folder is None or not source.with_name(KEY_NAME).exists():
        return None
    if may_be_public(access):
        return None
    from swarmnet.swarm_file.members import lists_for_owner

    return lambda: lists_for_owner(swarm_file.load(source), source, data_dir)


def may_be_public(access: "AccessPolicy") -> bool:
    """Return whether a proxy may show the page to anybody: it has a name, and asks for no key."""
    return bool(access.host_names) and not access.keys


def page_access(
    address: tuple[str, int],
    key: str | None,
    host_names: Sequence[str] = (),
    *,
    key_option: str = "--api-key-file FILE",
    port_option: str = "--port",
) -> "AccessPolicy":
    """Return the access rules of the page.

    Raises ``ConfigError`` for an invalid address or a missing key. A caller checks this before it
    searches the swarm, which takes seconds.
    """
    from swarmnet.web.middleware import AccessPolicy, ApiKeys, check_exposed
    from swarmnet.web.server import listen

    keys = ApiKeys({"dashboard": key} if key else {})
    check_exposed(address[0], keys, option=key_option)
    listen(*address, option=port_option).close()
    return AccessPolicy(keys, host_names, basic_auth=True)


def node_page(
    address: tuple[str, int], key_file: Path | None
) -> Callable[[Entry, Path, "Supervisor"], AbstractAsyncContextManager[str]]:
    """Return a function that serves the page of a node in a swarm, with its history in a folder.

    Raises ``ConfigError`` if ``address`` cannot serve it.
    """
    key_option = "--dashboard-key-file FILE"
    access = page_access(address, _key_in(key_file), key_option=key_option, port_option="--dashboard")
    return partial(_serve_page, address, access)


@asynccontextmanager
async def _serve_page(
    address: tuple[str, int],
    access: "AccessPolicy",
    entry: Entry,
    data_dir: Path,
    node: "Supervisor",
) -> AsyncIterator[str]:
    """Serve a dashboard from a node's process while the context is open; yields its URL."""
    from swarmnet.dashboard.observing.polling import ObserverDependencies
    from swarmnet.dashboard.server import run_dashboard

    of_node = node.dependencies
    dependencies = ObserverDependencies(
        of_node.transport, of_node.directory, timing=of_node.timing, own_report=node.report
    )
    lists = owners_lists(entry, data_dir, access)
    page = run_dashboard(dependencies, entry, data_dir / HISTORY, address, access, lists)
    async with page as (endpoint, _):
        yield endpoint.url
