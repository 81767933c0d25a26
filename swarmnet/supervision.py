"""Telling systemd, where it started us, that we serve or are about to stop: the datagrams of sd_notify(3)."""

import os
import socket
from contextlib import suppress


def notify_ready(text: str) -> None:
    """We serve now; ``text`` is what `systemctl status` shows."""
    _notify(f"READY=1\nSTATUS={_one_line(text)}")


def notify_status(text: str) -> None:
    _notify(f"STATUS={_one_line(text)}")


def notify_stopping() -> None:
    _notify("STOPPING=1")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _notify(message: str) -> None:
    """Does nothing without a supervisor that listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        channel.sendall(message.encode())
