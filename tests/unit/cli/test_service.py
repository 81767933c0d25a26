"""A node under systemd: the unit has the command as typed, systemd accepts the unit, and is told
when the node is ready."""

import os
import shlex
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmnet import cli
from swarmnet.systemd import MARK, Service, notify_ready, notify_status, notify_stopping, quote, unit_text
from swarmnet_protocols.errors import ConfigError

JOIN = ["join", "lab/swarm.toml", "--num-blocks", "10"]


@pytest.fixture(autouse=True)
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the swarm in which a user types the commands."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "swarm.toml").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A stand-in for systemctl that records its arguments; returns a function that reads the
    records."""
    log, program = tmp_path / "systemctl.log", tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho ActiveState=active\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return lambda: log.read_text().splitlines()


def test_install_writes_the_command_as_typed_and_starts_it(
    systemctl: Callable[[], list[str]], tmp_path: Path
) -> None:
    assert cli.execute(["service", "install", "--name", "lab", *JOIN]) == 0
    unit = (tmp_path / "config/systemd/user/lab.service").read_text()
    (command,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    program, *arguments = shlex.split(command.removeprefix("ExecStart="))
    assert Path(program).name == "swarmnet"
    assert arguments == JOIN
    assert f"WorkingDirectory={Path.cwd()}" in unit
    assert systemctl() == [
        "--user daemon-reload",
        "--user enable lab.service",
        "--user restart --no-block lab.service",
    ]


def test_uninstall_stops_it_and_leaves_nothing(systemctl: Callable[[], list[str]], tmp_path: Path) -> None:
    assert cli.execute(["service", "install", *JOIN]) == 0
    assert cli.execute(["service", "uninstall"]) == 0
    assert "--user disable --now swarmnet.service" in systemctl()
    assert not list((tmp_path / "config/systemd/user").iterdir())
    assert cli.execute(["service", "uninstall"]) == 5


def test_a_unit_that_swarmnet_did_not_install_is_left_as_it_is(
    systemctl: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "config/systemd/user/nginx.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Unit]\n")
    for command in (["install", "--name", "nginx", *JOIN], ["uninstall", "--name", "nginx"]):
        assert cli.execute(["service", *command]) == 3
    assert path.read_text() == "[Unit]\n"


def test_status_is_what_systemd_says(
    systemctl: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(["service", "status", "--json"]) == 0
    assert '"ActiveState": "active"' in capsys.readouterr().out


def test_a_dry_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["service", "install", "--dry-run", "--system", *JOIN]) == 0
    unit = capsys.readouterr().out
    assert unit.startswith(MARK)
    assert "User=" in unit
    assert "WantedBy=multi-user.target" in unit


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["dashboard"], 2, "--swarm"),
        (["join", "lab", "--no-such-option"], 2, "--no-such-option"),
        (["join", "lab", "--num-blocks", "many"], 2, "--num-blocks"),
        (["join", "no-such-swarm"], 3, "neither a swarm file"),
        (["join", "empty"], 3, "neither a swarm file"),
        (["train", "join", "a" * 64, "--swarm", "lab"], 2, "--yes"),
        (["train", "status"], 2, "is not a service"),
        (["status"], 2, "is not a service"),
        (["no-such-command"], 2, "is not a service"),
        (["join", "swn1" + "a" * 40], 3, "secret"),
        (["serve", "--swarm=swn1" + "a" * 40], 3, "secret"),
        (["serve", "--swarm", "lab", "--api-key", "k"], 2, "--api-key"),
        (["join", "lab", "--cache-dir", "x\nExecStartPre=evil"], 3, "line break"),
        (["--name", "../x", *JOIN], 3, "name"),
    ],
)
def test_units_that_systemd_could_not_start_are_refused(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(["service", "install", "--dry-run", *arguments]) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("argument", ["a b", "100%", "$HOME", 'say "x"', "back\\slash", "", "ü", "it's"])
def test_systemd_reads_arguments_as_they_are_meant(argument: str) -> None:
    """By its own rules: specifiers, then words with escapes, then variables."""
    words = shlex.split(quote(argument).replace("%%", "%"))
    assert [word.replace("$$", "$") for word in words] == [argument]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_takes_the_unit(is_system: bool, tmp_path: Path) -> None:
    path = tmp_path / "lab.service"
    path.write_text(unit_text([*JOIN, "--data-dir", "my $data 100%"], is_system=is_system))
    scope = [] if is_system else ["--user"]
    done = subprocess.run(
        ["systemd-analyze", "verify", *scope, "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_without_systemd_is_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.execute(["service", "status"]) == 3
    assert "no systemd" in capsys.readouterr().err


@pytest.mark.parametrize("refused", ["daemon-reload", "enable", "restart"])
def test_an_install_that_fails_leaves_nothing_behind(
    refused: str, systemctl: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _refuse(tmp_path, refused)
    assert cli.execute(["service", "install", *JOIN]) == 1
    assert "No medium found" in capsys.readouterr().err
    assert not (tmp_path / "config").exists()
    if refused != "daemon-reload":
        assert systemctl()[-2:] == ["--user disable --now swarmnet.service", "--user daemon-reload"]


def test_an_install_that_fails_keeps_the_former_unit(
    systemctl: Callable[[], list[str]], tmp_path: Path
) -> None:
    assert cli.execute(["service", "install", *JOIN]) == 0
    path = tmp_path / "config/systemd/user/swarmnet.service"
    former = path.read_text()
    _refuse(tmp_path, "restart")
    assert cli.execute(["service", "install", *JOIN[:2], "--num-blocks", "20"]) == 1
    assert path.read_text() == former
    assert not any("disable" in line for line in systemctl())


def test_each_command_has_a_unit_of_its_own(
    systemctl: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bootstrap peer does not take the place of the node on the same machine."""
    for command in (
        JOIN,
        ["bootstrap", "lab/swarm.toml"],
        ["train", "join", "a" * 64, "--swarm", "lab", "--yes"],
    ):
        assert cli.execute(["service", "install", *command]) == 0
    assert "journalctl --user -u swarmnet-bootstrap -f" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "config/systemd/user").iterdir()}
    assert names == {"swarmnet.service", "swarmnet-bootstrap.service", "swarmnet-train-join.service"}
    assert cli.execute(["service", "uninstall", "--name", "swarmnet-bootstrap"]) == 0


def _refuse(tmp_path: Path, command: str) -> None:
    """Let the stand-in for systemctl refuse a command."""
    program, log = tmp_path / "bin" / "systemctl", tmp_path / "systemctl.log"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$2" != {command} ] || {{ echo "No medium found" >&2; exit 1; }}\n'
    )


def test_a_refusal_of_systemd_is_passed_on(
    systemctl: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\necho 'No medium found' >&2; exit 1\n")
    assert cli.execute(["service", "status"]) == 1
    assert "No medium found" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["{tmp}/notify", "@swarmnet-test-{pid}"])
def test_systemd_is_told_that_the_node_is_ready_paused_and_stopping(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address.format(tmp=tmp_path, pid=os.getpid())
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0"))
        systemd.settimeout(5)
        notify_ready("online\nblocks 0:10")
        notify_status("paused")
        notify_stopping()
        assert [systemd.recv(1024) for _ in range(3)] == [
            b"READY=1\nSTATUS=online blocks 0:10",
            b"STATUS=paused",
            b"STOPPING=1",
        ]


def test_without_systemd_no_notice_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_ready("online")


def test_names_of_units_are_checked() -> None:
    for name in ("", "a/b", ".hidden", "x" * 65, "a b"):
        with pytest.raises(ConfigError, match="unit"):
            Service(name, is_system=False)


def test_a_node_continues_when_systemd_no_longer_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_ready("online")
