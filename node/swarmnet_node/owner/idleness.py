"""Seconds since the last use of keyboard, mouse or terminal of this machine."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

from swarmnet_protocols.machine.clock import Clock

_ASK_S = 2.0
_TERMINALS = ("/dev/pts/[0-9]*", "/dev/tty[0-9]*")


def idle_s(clock: Clock) -> float | None:
    """Return the seconds since keyboard, mouse or a terminal was last used. None if unknown.

    May take seconds.

    - Linux: the smallest of logind's idle time of sessions, X's idle time of keyboard and mouse,
      and the time since input on a terminal.
    - macOS: the idle time of the input system (``HIDIdleTime``).
    """
    if sys.platform == "darwin":
        return _hid_idle_s()
    known = [
        seconds
        for seconds in (_logind_idle_s(clock), _x_idle_s(), _terminals_idle_s(clock))
        if seconds is not None
    ]
    return min(known, default=None)


def _output_of(*command: str) -> str:
    """Return the output of a command. Empty if it does not exist, fails or takes longer than
    ``_ASK_S``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _hid_idle_s() -> float | None:
    match = re.search(r'"HIDIdleTime" = ([0-9]+)', _output_of("ioreg", "-c", "IOHIDSystem", "-d", "4"))
    return int(match[1]) / 1e9 if match else None


def _logind_idle_s(clock: Clock) -> float | None:
    """Return logind's idle time of all sessions. Desktops report theirs, and logind reads the
    terminals."""
    shown = _output_of("loginctl", "show", "-p", "IdleHint", "-p", "IdleSinceHint")
    fields = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    since = fields.get("IdleSinceHint", "")
    if fields.get("IdleHint") == "no":
        return 0.0
    if fields.get("IdleHint") != "yes" or not since.isdigit() or int(since) == 0:
        return None
    return max(0.0, clock() - int(since) / 1e6)


def _terminals_idle_s(clock: Clock) -> float | None:
    """Return the seconds since the last input on a terminal: the access time of its device
    tells."""
    times = []
    for pattern in _TERMINALS:
        for path in Path("/").glob(pattern.lstrip("/")):
            try:
                status = path.stat()
            except OSError:
                continue
            # consoles without a login are root's
            if status.st_uid != 0 or path.parent.name == "pts":
                times.append(status.st_atime)
    return max(0.0, clock() - max(times)) if times else None


class _ScreenSaverInfo(ctypes.Structure):
    _fields_ = (
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle_ms", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    )


def _x_idle_s() -> float | None:
    """Return the idle time of the X server. Under Wayland it covers X programs only, so logind's
    counts."""
    try:  # by name, because ``find_library`` runs two processes each time
        x11, xss = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    except OSError:
        return None
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XDefaultRootWindow.restype = ctypes.c_ulong
    x11.XDefaultRootWindow.argtypes = [ctypes.c_void_p]
    x11.XCloseDisplay.argtypes = [ctypes.c_void_p]
    xss.XScreenSaverQueryInfo.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.POINTER(_ScreenSaverInfo)]
    display = x11.XOpenDisplay(None)
    if not display:
        return None
    try:
        info = _ScreenSaverInfo()
        asked = xss.XScreenSaverQueryInfo(display, x11.XDefaultRootWindow(display), ctypes.byref(info))
        return float(info.idle_ms) / 1000 if asked else None
    finally:
        x11.XCloseDisplay(display)
