"""The files of deploy/: the program accepts their commands and options, and systemd and compose
accept the files."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft201909Validator, ValidationError

from swarmnet import cli
from swarmnet.cli import check_arguments
from tests.support.house.deployment import (
    COMPOSE_SCHEMA,
    DEPLOY,
    ROOT,
    UNITS,
    Unit,
    compose,
    own_services,
    shell_commands,
)

MAX_EXPOSURE = 20
"""Exposure in tenths, as systemd-analyze counts it: below this a unit is OK, from 51 on EXPOSED."""
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: systemd)"
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def installed(unit: Unit, directory: Path) -> Path:
    """A copy of the unit that names a program on this machine."""
    program = directory / "swarmnet"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = directory / unit.path.name
    path.write_text(unit.path.read_text().replace("/opt/swarmnet/.venv/bin/swarmnet", str(program)))
    return path


@pytest.mark.parametrize("name", UNITS)
def test_commands_of_units_are_understood(name: str) -> None:
    program, *arguments = Unit(name).command
    assert program == "/opt/swarmnet/.venv/bin/swarmnet"
    check_arguments(arguments)


def test_the_node_of_the_unit_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    _, *arguments = Unit("swarmnet-node.service").command
    assert cli.execute(arguments) == 3
    assert "cannot read the swarm file" in json.loads(capsys.readouterr().out)["message"]


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    checked = analyze("verify", "--man=no", str(installed(Unit(name), tmp_path)))
    assert (checked.returncode, checked.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_units_are_exposed_to_little(name: str, tmp_path: Path) -> None:
    path = str(installed(Unit(name), tmp_path))
    checked = analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", "--no-pager", path)
    assert checked.returncode == 0, checked.stdout


@needs_systemd
def test_a_unit_without_its_hardening_is_found(tmp_path: Path) -> None:
    path = installed(Unit("swarmnet-node.service"), tmp_path)
    soft = re.sub(r"# The unit may use.*?\n\[Install\]", "[Install]", path.read_text(), flags=re.DOTALL)
    path.write_text(soft)
    checked = analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", "--no-pager", str(path))
    assert checked.returncode != 0


@pytest.mark.parametrize("name", UNITS)
def test_the_soft_memory_limit_of_a_unit_is_below_the_hard_one(name: str) -> None:
    service = Unit(name)["Service"]
    sizes = [
        int(service[key].rstrip("GM")) * (1024 if service[key][-1] == "G" else 1)
        for key in ("MemoryHigh", "MemoryMax")
    ]
    assert 0 < sizes[0] < sizes[1]


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_has_started_when_its_command_says_that_it_is_ready(name: str) -> None:
    """With `Type=notify`, the start of a command that never says so fails after a timeout."""
    unit = Unit(name)
    assert unit["Service"]["Type"] == "notify"
    command = unit.command[1]
    module = {"join": "foreground", "serve": "endpoint/serve"}.get(command, f"commands/{command}")
    assert "notify_ready(" in (ROOT / "swarmnet" / "cli" / f"{module}.py").read_text()


def test_compose_follows_the_specification() -> None:
    Draft201909Validator(COMPOSE_SCHEMA).validate(compose())


def test_a_mistake_in_compose_is_found() -> None:
    wrong = compose()
    wrong["services"]["node-1"]["helthcheck"] = {}
    with pytest.raises(ValidationError, match="helthcheck"):
        Draft201909Validator(COMPOSE_SCHEMA).validate(wrong)


@pytest.mark.parametrize(("name", "service"), own_services().items())
def test_commands_of_compose_are_understood(name: str, service: dict[str, Any]) -> None:
    commands = list(shell_commands(service)) if "entrypoint" in service else [service["command"]]
    assert commands
    for command in commands:
        check_arguments(command)


def test_compose_has_every_service_of_a_swarm() -> None:
    commands = [service["command"][0] for service in own_services().values() if "command" in service]
    assert sorted(commands) == ["bootstrap", "dashboard", "join", "join", "join", "serve"]
    assert {"prometheus", "grafana"} < set(compose()["services"])


@pytest.mark.parametrize(("name", "service"), compose()["services"].items())
def test_services_are_confined_bounded_and_watched(name: str, service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    once = service["restart"] == "no"
    assert service["healthcheck"].get("disable", False) is once
    assert "privileged" not in service
    tag = service["image"].rpartition(":")[2]
    assert re.fullmatch(r"v?[0-9]+\.[0-9]+\.[0-9]+", tag), "an image without its version changes by itself"


def test_only_the_swarms_own_port_is_open_to_others() -> None:
    published = {
        name: [port for port in service.get("ports", ()) if not port.startswith("127.0.0.1:")]
        for name, service in compose()["services"].items()
    }
    assert {name for name, ports in published.items() if ports} == {"bootstrap"}


def test_the_guide_opens_the_ports_on_which_its_command_listens() -> None:
    guide = (ROOT / "docs/guides/operator.md").read_text()
    (opened, command) = re.findall(r"open that port for ([^:]+):.*?```sh\n(.*?)```", guide, re.DOTALL)[0]
    check_arguments(shlex.split(command)[1:])
    listened = re.findall(r"--listen /ip4/0\.0\.0\.0/(tcp|udp)/(\d+)", command)
    assert {kind.upper() for kind, _ in listened} == set(re.findall("TCP|UDP", opened))
    assert len({port for _, port in listened}) == 1


@pytest.mark.parametrize("name", UNITS)
def test_units_on_one_machine_take_ports_of_their_own(name: str) -> None:
    ports = {unit: re.findall(r"--(?:metrics|port) (\d+)", " ".join(Unit(unit).command)) for unit in UNITS}
    others = {port for unit, used in ports.items() if unit != name for port in used}
    assert ports[name]
    assert not set(ports[name]) & others


def test_files_and_services_that_compose_refers_to_exist() -> None:
    whole = compose()
    for service in whole["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in whole["volumes"]
        assert set(service.get("depends_on", ())) <= set(whole["services"])
        assert set(service.get("secrets", ())) <= set(whole["secrets"])
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy/secrets/" in ignored


@pytest.mark.parametrize("example", sorted(path.name for path in (DEPLOY / "swarms").glob("*.toml")))
def test_a_swarm_is_created_from_each_example_as_its_comments_say(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = "12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
    address = f"/ip4/203.0.113.7/tcp/31337/p2p/{peer}"
    text = (DEPLOY / "swarms" / example).read_text()
    out = str(tmp_path / "out")

    def run(*arguments: str) -> dict[str, object]:
        assert cli.execute([*arguments, "--json"]) == 0
        fields: dict[str, object] = json.loads(capsys.readouterr().out)
        return fields

    made = run("swarm", "create", "ours", "--like", str(DEPLOY / "swarms" / example), "--out", out)
    assert run("swarm", "verify", out)["valid"]
    assert f'admission = "{made["admission"]}"' in text
    assert run("swarm", "sign", out, "--bootstrap", address)["bootstrap"] == [address]
    if made["admission"] == "allow-list":
        assert run("swarm", "approve", peer, out, "--role", "host")["roles"] == ["host"]
    else:
        assert str(run("swarm", "invite", out, "--role", "client", "--uses", "5")["invite"]).startswith(
            "swn1"
        )
    comments = [line for line in text.splitlines() if line.startswith("#")]
    written = (tmp_path / "out" / "swarm.toml").read_text()
    assert all(comment in written for comment in comments)


def test_the_readme_of_deploy_names_every_file() -> None:
    readme = (DEPLOY / "README.md").read_text()
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.name != "README.md"]
    unnamed = [
        str(path.relative_to(DEPLOY))
        for path in files
        if path.name not in readme and f"{path.relative_to(DEPLOY).parts[0]}/" not in readme
    ]
    assert unnamed == []
