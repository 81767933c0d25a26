"""``swarmnet agent`` gives each program the endpoint in the program's own way."""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

import pytest

from swarmnet import cli
from swarmnet.cli.endpoint.agent_programs import AGENTS, Served
from swarmnet.resident import Resident, announced

KEY = "a-key-for-tests"
EXIT = 7
JOB = "pile"
"""A training job: the endpoint finds its newest revision by this name."""
PROGRAM = f"""#!/bin/sh
printf '%s\\n' "$@" > "$AGENT_TEST/arguments"
env -0 > "$AGENT_TEST/environment"
exit {EXIT}
"""


class Models(BaseHTTPRequestHandler):
    contexts: Mapping[str, int] = MappingProxyType({"tiny": 8192, "small": 4096})

    def do_GET(self) -> None:
        is_right = self.headers["authorization"] == f"Bearer {KEY}"
        contexts = self.contexts if is_right else {}
        about = [
            {"id": name, "max_model_len": context, "available": True} for name, context in contexts.items()
        ]
        named = {each["id"]: each for each in about} | ({JOB: about[0]} if about else {})
        path = self.path.removeprefix("/v1/models").lstrip("/")
        missing = {"error": {"message": f"there is no model {path!r} here, only 'tiny', 'small'"}}
        answer: Any = named.get(path, missing) if path else {"data": about}
        self.send_response(404 if answer is missing else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An endpoint of this user, and programs that write down how they were started."""
    for name in AGENTS:
        file = tmp_path / name
        file.write_text(PROGRAM)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AGENT_TEST", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the key of an account")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with announced(Resident(address, KEY, "ab", "tiny")):
            yield address
        server.shutdown()


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_endpoint_and_its_own_arguments(name: str, url: str, tmp_path: Path) -> None:
    assert cli.execute(["agent", name, "--", "--print", "hi"]) == EXIT
    arguments = (tmp_path / "arguments").read_text().splitlines()
    pairs = (each.partition("=") for each in (tmp_path / "environment").read_text().split("\0"))
    environment = {key: value for key, _, value in pairs}
    assert arguments[-2:] == ["--print", "hi"]
    api = f"{url}/v1"
    match name:
        case "claude":
            assert environment["ANTHROPIC_BASE_URL"] == url
            assert environment["ANTHROPIC_AUTH_TOKEN"] == KEY
            assert environment["ANTHROPIC_MODEL"] == "tiny"
            assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} & environment.keys()
            assert environment["DISABLE_AUTO_COMPACT"] == "1"
        case "codex":
            config = tomllib.loads("\n".join(arguments[1:-2:2]))
            provider = config["model_providers"][config["model_provider"]]
            assert (config["model"], provider["base_url"]) == ("tiny", api)
            assert environment[provider["env_key"]] == KEY
        case "opencode":
            found: Any = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
            assert found["model"] == "swarmnet/tiny"
            assert found["provider"]["swarmnet"]["options"] == {"baseURL": api, "apiKey": KEY}
        case "aider":
            assert arguments[:2] == ["--model", "openai/tiny"]
            assert (environment["OPENAI_API_BASE"], environment["OPENAI_API_KEY"]) == (api, KEY)
            assert environment["OPENAI_BASE_URL"] == api


def test_an_agent_uses_the_model_that_is_named(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(["agent", "aider", "--model", "small"]) == EXIT
    assert "openai/small" in (tmp_path / "arguments").read_text().splitlines()
    assert cli.execute(["agent", "aider", "--model", JOB]) == EXIT
    assert f"openai/{JOB}" in (tmp_path / "arguments").read_text().splitlines()
    assert cli.execute(["agent", "aider", "--model", "other"]) == 3
    assert "only 'tiny', 'small'" in capfd.readouterr().err


def test_an_agent_does_not_start_without_a_model_that_answers(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Models, "contexts", {})
    assert cli.execute(["agent", "aider"]) != EXIT
    assert f"no model answers at the endpoint {url} now" in capfd.readouterr().err


def test_an_agent_is_told_when_the_model_is_too_small(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["agent", "claude"]) == EXIT
    assert "takes 8192 tokens, and the instructions and tools of claude" in capfd.readouterr().err


def test_claude_code_compacts_where_there_is_room() -> None:
    wide, narrow = (Served("http://127.0.0.1:1", KEY, "tiny", context) for context in (200_000, 32_768))
    assert "DISABLE_AUTO_COMPACT" not in AGENTS["claude"].setup(wide).defaults
    assert AGENTS["claude"].setup(narrow).defaults["DISABLE_AUTO_COMPACT"] == "1"
