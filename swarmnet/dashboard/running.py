"""A dashboard as a whole: an observer, its history, a feed, a server. By itself, or in the process of a node."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swarmnet.dashboard.feed import Feed
from swarmnet.dashboard.history import History
from swarmnet.dashboard.observing.observer import Observer, Vantage
from swarmnet.dashboard.observing.sightings import SwarmAbout
from swarmnet.dashboard.server import Place, serve
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.web.server import Endpoint
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId

INVITE = "INVITE"
ADDRESS = "ADDR"


@dataclass(frozen=True)
class Watched:
    """A swarm, and where its history is kept: a folder for each swarm within ``folder``."""

    file: SwarmFile
    folder: Path

    def about(self, observer: PeerId) -> SwarmAbout:
        # What a newcomer types: an invite where one is needed, and an address of a peer where the file has none. A page that is
        # open to all readers has neither.
        swarm = "swarm.toml" if self.file.is_open else INVITE
        bootstrap = () if self.file.bootstrap or not self.file.is_open else ("--bootstrap", ADDRESS)
        return SwarmAbout(
            self.file.name, self.file.swarm_id.hex(), str(self.file.admission), observer, (swarm, *bootstrap)
        )

    def make_folder(self) -> Path:
        """Raises ``ConfigError`` where it cannot be."""
        folder = self.folder / self.file.swarm_id.hex()[:16]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot keep a history in {folder}: {error.strerror}", hint="choose another --data-dir"
            ) from error
        return folder


@asynccontextmanager
async def run_dashboard(vantage: Vantage, watched: Watched, place: Place) -> AsyncIterator[Endpoint]:
    """Watch a swarm and show it at ``place`` while the context is open.

    Raises ``ConfigError`` for a place or a folder that will not do.
    """
    async with AsyncExitStack() as stack:
        history = stack.enter_context(History.open(watched.make_folder()))
        about = watched.about(vantage.transport.peer_id)
        names = {model.manifest: model.name for model in watched.file.models}
        observer = await stack.enter_async_context(Observer.watch(vantage, about, names))
        feed = await stack.enter_async_context(Feed.run(observer, history))
        yield await stack.enter_async_context(serve(feed, place))
