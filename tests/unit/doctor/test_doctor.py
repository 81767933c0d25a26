"""The doctor's checks: every fault is found, and its finding says what to do next."""

import json
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from swarmnet import cli
from swarmnet.doctor import facts
from swarmnet.doctor.checks import GIB, PYTHON, TESTED, Finding, Level, examine, worst
from swarmnet.doctor.gather import DoctorOptions, examine_disk, examine_model, secret_files
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.reachability.dial_back import Probed, ports_of
from tests.support.models.tiny_models import write_gguf

PEER = PeerId("12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p")
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
NOW = 1_800_000_000.0
DAY_S = 86400.0


def peer(
    observed_ip: str = "8.8.8.8", reached: tuple[int, ...] = (31337,), behind_s: float = 0.1
) -> facts.BootstrapPeer:
    return facts.BootstrapPeer(ADDRESS, Probed(PEER, observed_ip, reached, behind_s, 0.05))


HEALTHY = facts.Facts(
    now=NOW,
    data_dir=Path("/data"),
    python=(3, 11),
    installed={name: version(name) for name in TESTED},
    disks=[facts.Disk("models", Path("/cache"), 100 * GIB)],
    memory=facts.Memory(16 * GIB),
    device=facts.Device("RTX", usable=True),
    kernels="wheel",
    secrets=[facts.SecretFile(Path("/data/identity.key"), 0o600, is_ours=True)],
    node="online",
    listening=[facts.ListenAddress("/ip4/0.0.0.0/tcp/31337")],
    swarm=facts.SwarmFacts(
        "lab", not_after=NOW + 300 * DAY_S, needs_certificate=True, certificate_until=NOW + 5 * DAY_S
    ),
    peers=[peer(), peer()],
    ports=[31337],
)


def problems(sick: facts.Facts) -> list[Finding]:
    return [finding for finding in examine(sick) if finding.level is not Level.OK]


def test_a_healthy_machine_has_no_findings() -> None:
    assert problems(HEALTHY) == []
    assert worst(examine(HEALTHY)) is Level.OK


def test_a_swarm_in_one_local_network_needs_no_bootstrap_peer() -> None:
    swarm = facts.SwarmFacts("lab", mdns=True)
    found = examine(replace(HEALTHY, peers=[], swarm=swarm, local_peers=3))
    texts = [finding.text for finding in found if finding.check == "mdns"]
    assert texts == ["mDNS is on, and found 3 peers in the local network"]
    assert worst(found) is Level.OK


@pytest.mark.parametrize(
    ("sick", "check", "level", "fix"),
    [
        ({"python": (3, 10)}, "python", "fail", "python3.11 -m venv"),
        ({"python": (3, 15)}, "python", "warn", "python3.11 -m venv"),
        ({"installed": {**HEALTHY.installed, "torch": None}}, "torch", "fail", "pip install 'torch"),
        ({"installed": {**HEALTHY.installed, "torch": "2.1.0"}}, "torch", "fail", "pip install 'torch"),
        ({"installed": {**HEALTHY.installed, "hivemind": "9.0"}}, "hivemind", "warn", "pip install 'hive"),
        ({"installed": {**HEALTHY.installed, "torch": "odd"}}, "torch", "fail", "pip install 'torch"),
        ({"kernels": ""}, "kernels", "warn", "apt install gcc"),
        ({"device": facts.Device("RTX", usable=False)}, "device", "warn", "pip install"),
        ({"memory": facts.Memory(GIB // 4), "node": ""}, "memory", "fail", "close other programs"),
        ({"node_warning": "another process is on the network"}, "node", "warn", "swarmnet finish"),
        ({"memory": facts.Memory(16 * GIB, GIB), "node": ""}, "memory", "warn", "--num-blocks"),
        ({"disks": [facts.Disk("models", Path("/c d"), GIB // 4)]}, "disk", "fail", "du -sh '/c d'"),
        ({"disks": [facts.Disk("models", Path("/c"), GIB)]}, "disk", "warn", "du -sh"),
        ({"disks": [facts.Disk("models", Path("/c"), GIB, "permission denied")]}, "disk", "fail", "chown"),
        ({"secrets": [facts.SecretFile(Path("/k.key"), 0o640, True)]}, "keys", "fail", "chmod 600 /k.key"),
        ({"secrets": [facts.SecretFile(Path("/data"), 0o755, True)]}, "keys", "fail", "chmod 700 /data"),
        ({"secrets": [facts.SecretFile(Path("/k.key"), 0o600, False)]}, "keys", "fail", "chown"),
        (
            {"listening": [facts.ListenAddress("/x", "in use", "take another")]},
            "listen",
            "fail",
            "take another",
        ),
        ({"swarm": None, "peers": []}, "swarm", "skip", "doctor --swarm"),
        (
            {"swarm": facts.SwarmFacts("lab", "it is changed", "get it again")},
            "swarm",
            "fail",
            "get it again",
        ),
        ({"swarm": facts.SwarmFacts("lab", not_after=NOW + DAY_S)}, "swarm", "warn", "the person who runs"),
        (
            {"swarm": facts.SwarmFacts("lab", needs_certificate=True, certificate_error="ended")},
            "certificate",
            "fail",
            "invite",
        ),
        (
            {"swarm": facts.SwarmFacts("lab", needs_certificate=True, certificate_until=NOW + 3600)},
            "certificate",
            "warn",
            "issuer",
        ),
        ({"peers": []}, "bootstrap", "warn", "sign SWARM --bootstrap"),
        ({"peers": [facts.BootstrapPeer(ADDRESS, error="refused")]}, "bootstrap", "fail", "--bootstrap"),
        ({"peers": [], "swarm": facts.SwarmFacts("lab", mdns=True)}, "mdns", "warn", "--bootstrap ADDR"),
        (
            {"peers": [peer(), facts.BootstrapPeer(ADDRESS, error="refused")]},
            "bootstrap",
            "warn",
            "ask for a swarm file",
        ),
        ({"peers": [peer(behind_s=60.0)]}, "clock", "warn", "timedatectl"),
        ({"peers": [peer(behind_s=-900.0)] * 2 + [peer()]}, "clock", "fail", "timedatectl"),
        ({"peers": [peer(reached=())]}, "reachable", "warn", "--listen"),
        (
            {"node": "online", "node_reached": "not at all", "node_advice": "enable UPnP"},
            "reach",
            "warn",
            "UPnP",
        ),
        ({"peers": [peer(observed_ip="", reached=())]}, "reachable", "warn", "--listen"),
        ({"not_gathered": {"device": "it took more than 6 s"}}, "device", "warn", "swarmnet doctor"),
        (
            {"model": facts.ModelFiles("m.gguf", error="m.gguf is empty", hint="again")},
            "model",
            "fail",
            "again",
        ),
        ({"model": facts.ModelFiles("m.gguf", 17 * GIB)}, "model", "warn", "--num-blocks"),
        (
            {"model": facts.ModelFiles("m.gguf", GIB, "IQ2_XXS is computed in float32")},
            "model",
            "warn",
            "Q4_K_M",
        ),
    ],
)
def test_each_fault_gives_one_finding_with_a_fix(
    sick: dict[str, object], check: str, level: str, fix: str
) -> None:
    (finding,) = problems(replace(HEALTHY, **sick))  # type: ignore[arg-type]
    assert (finding.check, finding.level) == (check, level)
    assert finding.fix
    assert fix in finding.fix
    assert worst([finding]) == ("ok" if level == "skip" else level)


def test_one_peer_with_a_wrong_clock_gives_no_finding() -> None:
    assert problems(replace(HEALTHY, peers=[peer(), peer(), peer(behind_s=5000.0)])) == []


def test_a_finding_about_a_clock_says_whether_it_is_ahead_or_behind() -> None:
    for behind_s, text in ((600.0, "10 minutes behind"), (-600.0, "10 minutes ahead of")):
        (finding,) = problems(replace(HEALTHY, peers=[peer(behind_s=behind_s)]))
        assert text in finding.text


def test_peers_in_the_same_network_prove_no_reachability_from_outside() -> None:
    (finding,) = [
        each for each in examine(replace(HEALTHY, peers=[peer("192.168.1.5")])) if each.check == "reachable"
    ]
    assert "your own network" in finding.text


def test_tested_versions_begin_where_the_requirements_do() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    required = {Requirement(each).name: Requirement(each).specifier for each in project["dependencies"]}
    for name, tested in TESTED.items():
        bounds = {str(bound) for bound in required[name]}
        assert tested.partition(",")[0] in bounds
        assert bounds <= set(tested.split(","))
    assert project["requires-python"] == f">={PYTHON[0][0]}.{PYTHON[0][1]}"


def test_a_model_is_examined_by_its_headers(tmp_path: Path) -> None:
    options = DoctorOptions(tmp_path, tmp_path / "cache", model=str(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "m.gguf", "llama")
    good = examine_model(options)
    assert good is not None
    assert (good.error, good.notice) == ("", "")
    assert 0 < good.memory_bytes < 1 << 20
    (tmp_path / "m.gguf").write_bytes(b"<html>")
    bad = examine_model(options)
    assert bad is not None
    assert "web page" in bad.error
    assert bad.hint


def test_modes_of_key_files_and_disks_of_missing_folders_are_examined(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    (data_dir / "identity.key").touch(mode=0o644)
    (data_dir / "identity.key").chmod(0o644)
    assert [(each.path.name, each.mode) for each in secret_files(data_dir)] == [
        ("data", 0o755),
        ("identity.key", 0o644),
    ]
    assert secret_files(tmp_path / "absent") == []
    assert examine_disk("models", tmp_path / "a" / "b" / "c").path == tmp_path


def test_only_tcp_ports_of_this_peer_are_examined() -> None:
    addresses = [
        "/ip4/10.0.0.1/tcp/4001/p2p/X",
        "/ip4/127.0.0.1/tcp/4001/p2p/X",
        "/ip4/10.0.0.1/udp/4002/quic-v1/p2p/X",
        "/ip4/1.2.3.4/tcp/5001/p2p/R/p2p-circuit/p2p/X",
        "/ip6/::1/tcp/4003/p2p/X",
    ]
    assert ports_of(addresses) == [4001, 4003]


def test_the_command_prints_all_findings_and_exits_with_1_on_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    command = ["doctor", "--data-dir", str(data_dir), "--cache-dir", str(tmp_path), "--json"]
    cli.execute(command)
    output = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in output["findings"]} >= {
        "python",
        "packages",
        "disk",
        "keys",
        "swarm",
    }
    data_dir.chmod(0o755)
    assert cli.execute(command) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["worst"] == "fail"
    assert f"chmod 700 {data_dir}" in [finding["fix"] for finding in output["findings"]]


def test_an_invite_is_not_redeemed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["doctor", "--data-dir", str(tmp_path / "d"), "--swarm", "swn1xyz", "--json"]) == 1
    assert "redeems it" in capsys.readouterr().out
    assert not (tmp_path / "d").exists()
