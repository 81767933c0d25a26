"""systemd: the unit of a swarmnet command, and notifications of its state by sd_notify(3)."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, SwarmnetError, Unreachable

MARK = "# Written by `swarmnet service install`; `swarmnet service uninstall` removes it."
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SYSTEMCTL_S = 60.0
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True)
class Service:
    """The unit ``name``.service, of this user or, with ``is_system``, of the machine."""

    name: str
    is_system: bool

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for an invalid name of a unit."""
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name[:80]!r} cannot be a unit's name", hint="use letters, digits, dots and dashes"
            )

    @property
    def unit(self) -> str:
        return f"{self.name}.service"

    @property
    def path(self) -> Path:
        if self.is_system:
            return Path("/etc/systemd/system") / self.unit
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(config) / "systemd" / "user" / self.unit

    def install(self, text: str) -> None:
        """Write the unit, start it, and have systemd start it with the machine.

        If this fails, the former unit is back, or nothing is left behind. Raises ``ConfigError`` if
        another program wrote a unit of that name or the file cannot be written, and
        ``SwarmnetError`` if systemd refuses.
        """
        _require_systemd()
        self._check_ours()
        with self._restored_on_failure():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(text)
            except OSError as error:
                raise ConfigError(
                    f"cannot write {self.path}: {error.strerror}",
                    hint="with --system, use sudo"
                    if self.is_system
                    else "check the permissions of the directory",
                ) from error
            self._systemctl("daemon-reload")
            self._systemctl("enable", self.unit)
            self._systemctl("restart", "--no-block", self.unit)  # it may run with other arguments

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Restore the former unit if the body fails. Without a former unit, remove the file, its
        link and its new folders."""
        former = self.path.read_text() if self.path.exists() else None
        made = [each for each in self.path.parents if not each.exists()]
        try:
            yield
        except BaseException:
            with suppress(SwarmnetError):  # systemd may be what failed
                if former is None:
                    self._systemctl("disable", "--now", self.unit)
            with suppress(OSError):
                if former is None:
                    self.path.unlink(missing_ok=True)
                else:
                    self.path.write_text(former)
                for each in made:
                    each.rmdir()
            with suppress(SwarmnetError):
                self._systemctl("daemon-reload")
            raise

    def uninstall(self) -> None:
        """Stop and remove the unit. Raises ``ConfigError`` if another program wrote it,
        ``Unreachable`` if there is none."""
        _require_systemd()
        if not self.path.exists():
            raise Unreachable(f"there is no {self.path}", hint="see what there is: swarmnet service status")
        self._check_ours()
        self._systemctl("disable", "--now", self.unit)
        self.path.unlink()
        self._systemctl("daemon-reload")

    def status(self) -> dict[str, str]:
        """Return the state of the unit: systemd's properties by name."""
        _require_systemd()
        names = (
            "LoadState",
            "ActiveState",
            "SubState",
            "UnitFileState",
            "StatusText",
            "MainPID",
            "NRestarts",
        )
        shown = self._systemctl("show", self.unit, *(f"--property={name}" for name in names))
        pairs = (line.partition("=") for line in shown.splitlines())
        return {name: value for name, _, value in pairs}

    def _check_ours(self) -> None:
        if self.path.exists() and not self.path.read_text(errors="replace").startswith(MARK):
            raise ConfigError(
                f"{self.path} was not written by swarmnet", hint="choose another name: --name NAME"
            )

    def _systemctl(self, *arguments: str) -> str:
        command = ["systemctl", *([] if self.is_system else ["--user"]), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise SwarmnetError(f"{' '.join(command)} does not end") from error
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            hint = "use sudo" if self.is_system else "log in as this user, without sudo or su, and try again"
            raise SwarmnetError(f"{' '.join(command)}: {reason[0]}", hint=hint)
        return done.stdout


def unit_text(arguments: Sequence[str], *, is_system: bool) -> str:
    """Return the unit that runs ``swarmnet`` with these arguments. It runs in the current
    directory, so relative paths stay valid."""
    user = f"User={os.environ.get('SUDO_USER') or 'root'}\n" if is_system else ""
    target = "multi-user.target" if is_system else "default.target"
    command = " ".join(map(quote, [_program(), *arguments]))
    return f"""\
{MARK}
[Unit]
Description=swarmnet {arguments[0]}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
ExecStart={command}
WorkingDirectory={str(Path.cwd()).replace("%", "%%")}
{user}Environment=SWARMNET_LOG_FORMAT=json
# The first start may fetch a model.
TimeoutStartSec=infinity
# SIGTERM is for the process alone: it lets sessions move away (30 s) before it ends p2pd.
KillMode=mixed
TimeoutStopSec=75
Restart=on-failure
RestartSec=5
# Not for errors that a restart cannot fix: usage, config, not authorised, integrity, incompatible version.
RestartPreventExitStatus=2 3 4 7 8
Nice=10
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictSUIDSGID=yes
LockPersonality=yes

[Install]
WantedBy={target}
"""


def quote(argument: str) -> str:
    """Quote an argument for ``ExecStart``, ``%`` and ``$`` included. Raises ``ConfigError`` for
    control characters, which no unit can hold."""
    if not argument.isprintable():
        raise ConfigError(f"{argument[:80]!r} cannot be in a unit", hint="leave out line breaks and controls")
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if _PLAIN.fullmatch(escaped) else f'"{escaped}"'


def _program() -> str:
    """Return the path of the ``swarmnet`` program. Raises ``ConfigError`` if it is not
    installed."""
    found = shutil.which(sys.argv[0])
    if found and Path(found).name == "swarmnet":
        return str(Path(found).absolute())
    beside = Path(sys.executable).with_name("swarmnet")
    if not beside.exists():
        raise ConfigError(
            f"there is no {beside}",
            hint="install swarmnet into this Python: pip install ./swarmnet_p2p-*.whl",
        )
    return str(beside)


def _require_systemd() -> None:
    if shutil.which("systemctl") is None:
        raise ConfigError(
            "there is no systemd on this machine",
            hint="start swarmnet as you start other programs here; --dry-run shows the command",
        )


def notify_ready(text: str) -> None:
    """Report that this process serves. ``text`` is what `systemctl status` shows."""
    _notify(f"READY=1\nSTATUS={_one_line(text)}")


def notify_status(text: str) -> None:
    """Replace the text that `systemctl status` shows."""
    _notify(f"STATUS={_one_line(text)}")


def notify_stopping() -> None:
    """Report that this process is about to stop."""
    _notify("STOPPING=1")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _notify(message: str) -> None:
    """Send a datagram to systemd. Does nothing if systemd did not start this process."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if sys.platform != "linux" or not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        channel.sendall(message.encode())
