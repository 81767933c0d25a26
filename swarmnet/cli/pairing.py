"""Talks with the people at both computers when one joins a household swarm by a code."""

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Thread

from swarmnet.cli.output import say
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet.swarm_file.household import joined_household, remember_household
from swarmnet.swarm_file.local_peer import LocalPeer
from swarmnet_protocols.errors import ConfigError, OutOfResources

_MAX_LINE_BYTES = 256


def enter_household(data_dir: Path, name: str, bootstrap: Sequence[str], *, as_json: bool) -> Entry:
    """Return the entry to the household swarm that this computer joined before, or that it joins by
    a code. ``name``: of this computer, for the people at the other one.

    Raises what ``pair`` and ``enter`` raise.
    """
    if (joined := joined_household(data_dir)) is not None:
        return enter(joined, data_dir, bootstrap)
    from swarmnet_protocols.joining.errands import pair

    peer = LocalPeer(data_dir)
    say(
        {"event": "searching"},
        "looking for a computer in this network on which `swarmnet start` runs",
        as_json=as_json,
    )
    paired = asyncio.run(
        pair(
            peer.identity_path,
            name,
            partial(_choose, as_json=as_json),
            partial(_ask, as_json=as_json),
        )
    )
    entry = enter(paired.invite, data_dir, (*paired.addresses, *bootstrap))
    try:
        remember_household(data_dir, entry.file.swarm_id)
    except OSError as error:
        raise OutOfResources(
            f"cannot write into {data_dir}: {error.strerror}", hint="check the disk of this machine"
        ) from error
    say({"event": "paired", "swarm": paired.house}, f"joined the swarm {paired.house}", as_json=as_json)
    return entry


def show_code(code: str, newcomer: str, *, as_json: bool) -> None:
    """Show a code to the people in the room."""
    from swarmnet_protocols.joining.pairing import CODE_S

    event: dict[str, object] = {"event": "code", "code": code, "newcomer": newcomer, "valid_s": CODE_S}
    who = newcomer or "a computer"
    text = f"{who} wants to join. If it is yours, type this code there within a minute: {_spaced(code)}"
    say(event, text, as_json=as_json)


def show_newcomer(newcomer: str, *, as_json: bool) -> None:
    say({"event": "newcomer", "newcomer": newcomer}, f"{newcomer or 'a computer'} joined", as_json=as_json)


async def _choose(names: Sequence[str], *, as_json: bool) -> int:
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    say(
        {"event": "choose", "swarms": list(names)},
        f"several swarms answer: {listed}. Type the number of yours:",
        as_json=as_json,
    )
    while True:
        line = await _line()
        if line.isdecimal() and 1 <= int(line) <= len(names):
            return int(line) - 1


async def _ask(house: str, left: int | None, *, as_json: bool) -> str:
    from swarmnet_protocols.joining.pairing import DIGITS

    match left:
        case None:
            text = f"found the swarm {house}. Type the {DIGITS} digits that the other computer shows:"
        case 0:
            text = "that code is not valid any more. Type the one that is shown now:"
        case 1:
            text = "that was not the code. There is one more try:"
        case _:
            text = f"that was not the code. There are {left} more tries:"
    say({"event": "asks_code", "swarm": house, "tries": left}, text, as_json=as_json)
    while True:
        code = re.sub(r"[\s-]", "", await _line())
        if re.fullmatch(rf"[0-9]{{{DIGITS}}}", code):
            return code
        say({"event": "no_code"}, f"a code has {DIGITS} digits:", as_json=as_json)


async def _line() -> str:
    """Return the next line of stdin. Raises ``ConfigError`` when stdin has ended.

    A daemon thread reads it, because not every event loop can watch a pipe, and the end of the
    process must not wait for it.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    def take(line: bytes) -> None:
        if not found.done():
            found.set_result(line)

    def read() -> None:
        line = b""
        while not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
            if not (byte := os.read(sys.stdin.fileno(), 1)):
                break
            line += byte
        try:
            loop.call_soon_threadsafe(take, line)
        except RuntimeError:  # the loop is closed
            return

    Thread(target=read, name="stdin", daemon=True).start()
    line = await found
    if not line:
        raise ConfigError(
            "nobody typed the code", hint="type it at the prompt; scripts write it to stdin as a line"
        )
    return line.decode(errors="replace").strip()


def _spaced(code: str) -> str:
    return f"{code[:3]} {code[3:]}"
