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
