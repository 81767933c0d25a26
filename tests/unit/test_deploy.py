"""What deploy/ asks of the program, the program understands."""

import configparser
import json
import shlex
from pathlib import Path

import pytest

from swarmnet import cli

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_command_of_the_unit_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string((DEPLOY / "swarmnet.service").read_text().replace("\\\n", " "))
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/swarmnet")
    assert cli.execute(arguments) == 3
    assert "cannot read the swarm file" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize("example", sorted(path.name for path in (DEPLOY / "swarms").glob("*.toml")))
def test_the_example_swarms_are_made_as_they_say(
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


def test_the_readme_names_every_example() -> None:
    readme = (DEPLOY / "README.md").read_text()
    assert all(path.name in readme for path in (DEPLOY / "swarms").iterdir())
