"""The p2pd child process (go-libp2p, from hivemind's wheel) and the calls on its control socket.

The life of a p2pd:

1. ``spawn`` starts it. Until this process connects, ``-idleTimeout`` ends it.
2. ``attend`` opens a persistent control connection. p2pd ends when that connection closes, so it
   outlives this process by milliseconds only, even after SIGKILL.
3. ``restart`` replaces it; ``stop`` ends it.
"""

import asyncio
import contextlib
import logging
import math
import os
import sys
import tempfile
import types
from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import ConfigError, IncompatibleVersion, PeerUnreachable
from swarmnet_protocols.machine.aio import loop_time, until, within
from swarmnet_protocols.machine.files import MAX_SOCKET_PATH_BYTES, scratch_folder
from swarmnet_protocols.machine.lean_imports import prepare_package
from swarmnet_protocols.machine.platform import allow_open_files
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.process import (
    OPEN_FILES,
    check_free,
    log_output,
    spawn,
)
from swarmnet_protocols.net.pipe import Pipe, connected

_log = logging.getLogger(__name__)

_LONGEST_SOCKET = "swarmnet-xxxxxxxx/streams.sock"
"""Longest path of a socket, relative to the folder for temporary files."""
_SHORT_FOLDER = "/tmp"  # noqa: S108 - hivemind's sockets are there, too; the folder made in it has mode 0700

_SHUTDOWN_S = 5.0
_DISCONNECTS_AT_ONCE = 8
_PING, _PING_BYTES = "/ipfs/ping/1.0.0", 32  # libp2p's ping echoes what it receives
REFUSED = ("/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop")
"""Protocols that p2pd serves whatever its flags say: libp2p's own relay. Any peer could use that
relay past every limit of this project. A later handler replaces an earlier one, so each of these
gets a handler whose socket does not exist, and p2pd resets the stream."""
_P2P_CODE = b"\xa5\x03"  # of the multicodec table


def prepare_hivemind() -> None:
    """Import the used parts of hivemind without torch, and stop hivemind from writing to the
    terminal.

    torch would take 0.4 s.
    """
    for package in "hivemind", "hivemind.utils", "hivemind.dht":
        prepare_package(package)
    try:
        import_module("uvloop")
    except ImportError:  # on Windows; hivemind imports it for functions that are not used here
        sys.modules["uvloop"] = types.ModuleType("uvloop")
    from hivemind.utils.logging import get_logger, use_hivemind_log_handler
    from hivemind.utils.serializer import MSGPackSerializer, SerializerBase
    from hivemind.utils.timed_storage import get_dht_time

    # hivemind.dht takes these from the package, whose __init__ would import torch.
    vars(sys.modules["hivemind.utils"]).update(
        get_logger=get_logger,
        MSGPackSerializer=MSGPackSerializer,
        SerializerBase=SerializerBase,
        get_dht_time=get_dht_time,
    )
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.ERROR)


def pack_multiaddr(address: str) -> bytes:
    """Return the binary form of a multiaddr. Raises ``ConfigError`` for a bad one.

    hivemind's own packing writes peer ids as CIDs, which go-libp2p refuses.
    """
    from hivemind.utils.multiaddr import Multiaddr

    try:
        head, *rest = address.split("/p2p/")
        packed: bytes = Multiaddr(head).to_bytes() if head else b""
        for part in rest:
            peer, _, tail = part.partition("/")
            peer_bytes = pack_peer(PeerId(peer))
            packed += _P2P_CODE + bytes([len(peer_bytes)]) + peer_bytes
            packed += Multiaddr("/" + tail).to_bytes() if tail else b""
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is not a multiaddr: {error}",
            hint="it should look like /ip4/203.0.113.5/tcp/4001/p2p/12D3...",
        ) from error
    return packed


def unpack_multiaddr(packed: bytes) -> str:
    """Return the text of a multiaddr in binary form.

    Empty for other bytes, such as an address of an unknown transport.
    """
    from hivemind.utils.multiaddr import Multiaddr

    try:
        return str(Multiaddr(packed))
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        EOFError,
    ):  # lengths beyond the end of the bytes
        return ""


def pack_peer(peer: PeerId) -> bytes:
    """Return the binary form of a peer id. Raises ``ConfigError`` for an invalid one."""
    from hivemind.p2p import PeerID

    try:
        packed: bytes = PeerID.from_base58(peer).to_bytes()
    except ValueError as error:
        raise ConfigError(
            f"{peer[:128]!r} is not a peer id: {error}",
            hint="take the address a node prints when it is ready",
        ) from error
    return packed


def unpack_peer(packed: bytes) -> PeerId:
    """Return the base58 form of a peer id in binary form."""
    from hivemind.p2p import PeerID

    return PeerId(PeerID(packed).to_base58())


class P2pd:
    """A running p2pd. Made by :func:`run_p2pd`."""

    def __init__(self, control_path: Path, process: asyncio.subprocess.Process) -> None:
        self.control_path = control_path
        self.process = process
        self._output: asyncio.Task[None] | None = None
        self._lifeline: Pipe | None = None
        self._is_up = asyncio.Event()
        self._is_up.set()

    async def attend(self) -> None:
        """Open the persistent connection that ties p2pd's life to this process, and log its
        output."""
        from hivemind.proto import p2pd_pb2 as pb

        self._output = asyncio.create_task(log_output(self.process))
        self._lifeline = await self._dial()
        await self._exchange(pb.Request(type=pb.Request.PERSISTENT_CONN_UPGRADE), self._lifeline)
        for protocol_id in REFUSED:
            await self.handle_streams(protocol_id, self.control_path.with_name("unserved.sock"))

    async def ended(self) -> None:
        """Return when p2pd has ended and is not being restarted."""
        process = None
        while process is not self.process:
            process = self.process
            await process.wait()
            await self._is_up.wait()

    async def restart(self, config: P2pdConfig) -> None:
        """Restart p2pd. Calls wait meanwhile, and every connection and stream ends.

        Raises as :func:`run_p2pd` does.
        """
        self._is_up.clear()
        try:
            await self.stop()
            self.control_path.unlink(missing_ok=True)
            self.process = await spawn(config, self.control_path)
        finally:
            self._is_up.set()
        await self.attend()

    async def stop(self) -> None:
        if self._lifeline is not None:
            self._lifeline.writer.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        if not await within(_SHUTDOWN_S, self.process.wait()):
            self.process.kill()
            await self.process.wait()
        if self._output is not None:
            await self._output

    def memory_bytes(self) -> int:
        """Return the resident memory in bytes; 0 after p2pd has ended."""
        import psutil

        try:
            rss: int = psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0
        return rss

    async def identify(self) -> list[str]:
        """Return the addresses where this peer can be dialled, without its id."""
        from hivemind.proto import p2pd_pb2 as pb

        response = await self._call(pb.Request(type=pb.Request.IDENTIFY))
        return [address for packed in response.identify.addrs if (address := unpack_multiaddr(packed))]

    async def connections(self) -> dict[PeerId, list[str]]:
        """Return the connected peers, each with the multiaddrs of its connections."""
        found: dict[PeerId, list[str]] = {}
        for peer, address in await self.packed_connections():
            found.setdefault(unpack_peer(peer), []).append(unpack_multiaddr(address))
        return found

    async def packed_connections(self) -> list[tuple[bytes, bytes]]:
        """Return peer and multiaddr of every connection, in binary form. A peer may have several
        connections."""
        from hivemind.proto import p2pd_pb2 as pb

        response = await self._call(pb.Request(type=pb.Request.LIST_PEERS))
        return [(info.id, address) for info in response.peers for address in info.addrs]

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to ``peer`` unless it is connected.

        Raises ``PeerUnreachable``, or ``ConfigError`` for a bad address.
        """
        from hivemind.proto import p2pd_pb2 as pb

        suffix = f"/p2p/{peer}"
        await self._call(
            pb.Request(
                type=pb.Request.CONNECT,
                connect=pb.ConnectRequest(
                    peer=pack_peer(peer),
                    addrs=[pack_multiaddr(address.removesuffix(suffix)) for address in addresses],
                    timeout=math.ceil(deadline_s),
                ),
            )
        )

    async def open_stream(self, peer: PeerId, protocol_id: str, *, deadline_s: float) -> Pipe:
        """Open a raw stream to a connected peer. Raises ``PeerUnreachable`` or
        ``IncompatibleVersion``."""
        from hivemind.proto import p2pd_pb2 as pb

        request = pb.Request(
            type=pb.Request.STREAM_OPEN,
            streamOpen=pb.StreamOpenRequest(
                peer=pack_peer(peer), proto=[protocol_id], timeout=math.ceil(deadline_s)
            ),
        )
        pipe = await self._dial()
        try:
            await self._exchange(request, pipe)
        except BaseException:
            pipe.writer.close()
            raise
        return pipe

    async def answers(self, peer: PeerId, *, within_s: float) -> bool:
        """Ping ``peer``. Returns False if the p2pd of ``peer`` did not answer in time. If the
        connection ended, returns True.

        p2pd answers even while the process that uses it is busy. Raises ``PeerUnreachable`` or
        ``IncompatibleVersion``.
        """
        when = loop_time() + within_s
        try:
            async with asyncio.timeout_at(when):
                pipe = await self.open_stream(peer, _PING, deadline_s=within_s)
        except TimeoutError:
            return False
        try:
            pipe.writer.write(os.urandom(_PING_BYTES))
            await until(when, lambda: pipe.reader.readexactly(_PING_BYTES))
        except TimeoutError:
            return False
        except (OSError, asyncio.IncompleteReadError):
            return True
        finally:
            pipe.writer.close()
        return True

    async def disconnect(self, peer: PeerId) -> None:
        """Close the connections to ``peer``, if there are any, with all streams over them."""
        await self.disconnect_all([pack_peer(peer)])

    async def disconnect_all(self, packed_peers: Sequence[bytes]) -> None:
        """Disconnect several peers in parallel. A peer that does not read takes p2pd a while."""
        from hivemind.proto import p2pd_pb2 as pb

        async def disconnect(share: Sequence[bytes]) -> None:
            pipe = await self._dial()
            try:
                for peer in share:
                    request = pb.DisconnectRequest(peer=peer)
                    await self._exchange(pb.Request(type=pb.Request.DISCONNECT, disconnect=request), pipe)
            finally:
                pipe.writer.close()

        shares = (packed_peers[number::_DISCONNECTS_AT_ONCE] for number in range(_DISCONNECTS_AT_ONCE))
        await asyncio.gather(*(disconnect(share) for share in shares if share))

    async def handle_streams(self, protocol_id: str, socket_path: Path) -> None:
        """Have p2pd connect to ``socket_path`` for every incoming stream under ``protocol_id``."""
        from hivemind.proto import p2pd_pb2 as pb

        await self._call(
            pb.Request(
                type=pb.Request.STREAM_HANDLER,
                streamHandler=pb.StreamHandlerRequest(
                    addr=pack_multiaddr(f"/unix{socket_path}"), proto=[protocol_id], balanced=False
                ),
            )
        )

    async def _dial(self) -> Pipe:
        await self._is_up.wait()
        loop = asyncio.get_running_loop()
        try:
            return await connected(loop.create_unix_connection(Pipe, str(self.control_path)))
        except OSError as error:
            raise PeerUnreachable("p2pd is not running", hint="restart this node") from error

    async def _call(self, request: Any) -> Any:
        pipe = await self._dial()
        try:
            return await self._exchange(request, pipe)
        finally:
            pipe.writer.close()

    async def _exchange(self, request: Any, pipe: Pipe) -> Any:
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2 as pb

        response = pb.Response()
        try:
            await write_pbmsg(pipe.writer, request)
            await read_pbmsg_safe(pipe.reader, response)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PeerUnreachable("p2pd is gone", hint="restart this node") from error
        if response.type == pb.Response.ERROR:
            if "protocols not supported" in response.error.msg:
                raise IncompatibleVersion(response.error.msg)
            raise PeerUnreachable(response.error.msg)
        return response


@contextlib.asynccontextmanager
async def run_p2pd(config: P2pdConfig) -> AsyncIterator[P2pd]:
    """Run a p2pd while the context is open. Raises ``ConfigError`` when it cannot start as
    configured.
    """
    for address in (*config.listen, *config.announce):
        pack_multiaddr(address)
    for address in config.listen:
        check_free(address)
    allow_open_files(OPEN_FILES)
    folder = Path(tempfile.gettempdir())
    if len(bytes(folder / _LONGEST_SOCKET)) > MAX_SOCKET_PATH_BYTES:
        folder = Path(_SHORT_FOLDER)
    with scratch_folder(folder) as scratch:
        control_path = scratch / "p2pd.sock"
        daemon = P2pd(control_path, await spawn(config, control_path))
        try:
            await daemon.attend()
            yield daemon
        finally:
            await daemon.stop()
