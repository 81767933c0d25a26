"""Endpoints of this user: how commands find one, and what they get there."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from swarmnet import resident
from swarmnet.cli.chat.generation import SamplingOptions, Screen
from swarmnet.cli.chat.through_endpoint import EndpointAnswerer, ask
from swarmnet.resident import Resident, announced, find
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models.text.vocabulary import Vocabulary
from tests.defences import defence, nothing, replacing

HERE = Resident("http://127.0.0.1:1", "secret", "ab", "model")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resident, "default_state_dir", lambda: tmp_path)
    return tmp_path / "endpoints"


def test_a_running_endpoint_of_the_swarm_is_found(state: Path) -> None:
    assert find("ab", "model") is None
    with announced(HERE):
        assert find("ab", "model") == HERE
        assert find("cd", "model") is None
        assert find("ab", "another") is None
        assert [path.stat().st_mode & 0o777 for path in state.iterdir()] == [0o600]
    assert find("ab", "model") is None


def test_the_file_of_a_dead_endpoint_is_removed(state: Path) -> None:
    with announced(HERE):
        [path] = state.iterdir()
        dead = state / "dead.json"
        dead.write_bytes(path.read_bytes())
        dead.chmod(0o600)
    assert find("ab", "model") is None
    assert list(state.iterdir()) == []


@defence(
    "an endpoint that another user may have announced is not used",
    off=replacing(resident, "mode_for_others", nothing),
)
def test_a_folder_that_others_can_write_is_not_read(state: Path) -> None:
    with announced(HERE):
        state.chmod(0o777)
        assert find("ab", "model") is None


@pytest.mark.parametrize("content", ["", "[]", '{"url": 1}', '{"a": "b"}'])
def test_a_file_that_no_endpoint_wrote_is_ignored(state: Path, content: str) -> None:
    with announced(HERE):
        [path] = state.iterdir()
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, content.encode())
        os.close(descriptor)
        assert find("ab", "model") is None


@contextmanager
def endpoint(status: int, *lines: dict[str, Any]) -> Iterator[tuple[Resident, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked.append((self.path, self.headers["authorization"], json.loads(body)))
            self.send_response(status)
            self.end_headers()
            for line in lines:
                self.wfile.write(json.dumps(line).encode() + b"\n")

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Resident(f"http://127.0.0.1:{server.server_port}", "secret", "ab", "model"), asked
    finally:
        server.shutdown()
        server.server_close()


PROMPT = {"messages": [{"role": "user", "content": "hi"}]}
GREEDY = SamplingOptions(8, temperature=0.0)
TOKENS = ({"token": 5, "text": "a"}, {"token": 6, "text": ""})
END = {"text": "é", "prompt_tokens": 9, "report": {"route": [["p", 0, 2]], "trips": 2, "failovers": 1}}


def test_an_answer_through_an_endpoint_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(200, {"done": 600, "total": 1200}, *TOKENS, END) as (here, asked):
        answer = ask(here, PROMPT, GREEDY, Screen())
    assert answer is not None
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == ("aé", [5, 6], 9)
    assert (answer.trips, answer.failovers, answer.route[0].peer_id) == (2, 1, "p")
    shown = capsys.readouterr()
    assert shown.out == "aé"
    assert "a prompt of 1200 tokens" in shown.err
    options = {"max_new_tokens": 8, "temperature": 0.0, "speculate": True}
    assert asked == [(resident.PATH, "Bearer secret", PROMPT | options)]


@pytest.mark.parametrize(
    ("status", "lines"), [(503, ()), (200, ()), (200, ({"error": "no host", "hint": ""},))]
)
def test_an_endpoint_that_fails_at_once_leaves_the_answer_to_run(status: int, lines: Any) -> None:
    with endpoint(status, *lines) as (here, _):
        assert ask(here, PROMPT, GREEDY, Screen()) is None
    assert ask(here, PROMPT, GREEDY, Screen()) is None, "nothing listens there any more"


@pytest.mark.parametrize("end", [(), ({"error": "no host", "hint": "wait"},)])
def test_an_endpoint_that_fails_within_an_answer_is_an_error(end: Any) -> None:
    with endpoint(200, *TOKENS, *end) as (here, _), pytest.raises(SwarmnetError):
        ask(here, PROMPT, GREEDY, Screen())


WORDS = Vocabulary(None, 97, (), {})
VARIED = SamplingOptions(8, top_k=4, min_p=0.1, bad_words=["no"], logit_bias=["5=-1.5"])


def test_a_chat_sends_its_tokens_to_an_endpoint() -> None:
    tokens: list[int] = []
    reads: list[tuple[int, int]] = []
    with endpoint(200, {"done": 2, "total": 4}, *TOKENS, END) as (here, asked):
        answerer = EndpointAnswerer(here, WORDS, 512)
        answerer.answer(
            [1, 2, 3], SamplingOptions(8), tokens.append, prefilled=lambda *far: reads.append(far)
        )
        answerer.answer([1], VARIED, tokens.append)
    usual = {"max_new_tokens": 8, "speculate": True}
    assert [body for _, _, body in asked] == [
        {"ids": [1, 2, 3]} | usual,
        {"ids": [1], "top_k": 4, "min_p": 0.1, "bad_words": ["no"], "biases": [[5, -1.5]]} | usual,
    ]
    assert (tokens, reads) == ([5, 6, 5, 6], [(2, 4)])
    assert (answerer.report.trips, answerer.report.failovers) == (2, 1)


@pytest.mark.parametrize(("status", "lines"), [(503, ()), (200, TOKENS), (200, ({"error": "no host"},))])
def test_a_chat_hears_why_an_endpoint_fails(status: int, lines: Any) -> None:
    with endpoint(status, *lines) as (here, _), pytest.raises(SwarmnetError, match=r"endpoint|no host"):
        EndpointAnswerer(here, WORDS, 512).answer([1], GREEDY, lambda _: None)
