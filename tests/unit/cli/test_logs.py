"""Logs: each entry is one line in one format with its fields, has no secrets, and strangers cannot
make the log large."""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator

import pytest

from swarmnet import cli, logs
from swarmnet.logs import OF_A_PEER, Throttle, configure
from tests.defences import defence, replacing

INVITE = "swn1" + "aB3_" * 20
KEY = "-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----"
_log = logging.getLogger("swarmnet_node.test")


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    yield
    configure(log_format="text", level="warning")


def record(line: int, level: int, text: str = "text") -> logging.LogRecord:
    return logging.LogRecord("name", level, "file.py", line, text, (), None)


def test_json_is_one_object_a_line_with_fields_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format="json", level="info")
    _log.info("session refused", extra={"reason": "leaving", "sessions": 3})
    try:
        raise ValueError("bad")
    except ValueError:
        _log.exception("handler failed")
    logging.getLogger("hivemind.dht").error("from a library")
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load a kernel")
    refused, failed, foreign = map(json.loads, capsys.readouterr().err.splitlines())
    assert refused.pop("timestamp")
    assert refused == {
        "event": "session refused",
        "level": "info",
        "logger": "swarmnet_node.test",
        "reason": "leaving",
        "sessions": 3,
    }
    assert "ValueError: bad" in failed["exception"]
    assert (foreign["logger"], foreign["event"]) == ("hivemind.dht", "from a library")


def test_a_text_log_has_level_message_and_fields_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format="text", level="info")
    _log.warning("link\n lost", extra={"peer": "12D3KooW"})
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d warning: link lost  peer=12D3KooW", line)


def test_only_debug_records_name_modules(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format="text", level="debug")
    _log.debug("details")
    _log.error("no peer answers")
    details, error = capsys.readouterr().err.splitlines()
    assert "swarmnet_node.test" in details
    assert error.endswith("error: no peer answers")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_values_of_variables_are_not_shown(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["--log-format", log_format, "model", "ls"]) == 0
    capsys.readouterr()
    prompt = "".join(["what", " a", " prompt"])
    try:
        raise ValueError(len(prompt))
    except ValueError:
        _log.exception("failed")
    assert prompt not in capsys.readouterr().err


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("secret", [INVITE, KEY])
def test_invites_and_keys_are_struck_out(
    log_format: str, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(["--log-format", log_format, "model", "ls"]) == 0
    capsys.readouterr()
    _log.warning("given %s", secret, extra={"field": secret})
    try:
        raise ValueError(secret)
    except ValueError:
        _log.exception("failed")
    written = capsys.readouterr().err
    assert "[secret]" in written
    assert secret[-40:] not in written
    assert "MC4CAQ" not in written


def test_only_warnings_are_logged_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["model", "ls"]) == 0
    _log.info("details")
    logging.getLogger("uvicorn").info("details")
    assert capsys.readouterr().err == ""


def test_debug_messages_of_libraries_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format="text", level="debug")
    logging.getLogger("httpx").debug("HTTP Request: GET https://hub/private")
    logging.getLogger("asyncio").debug("Using selector")
    _log.debug("ours")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ours" in line


DAY_S = 86_400


def through(throttle: Throttle, records: Iterable[logging.LogRecord]) -> list[logging.LogRecord]:
    return [each for each in records if throttle.filter(each)]


def about(number: int) -> logging.LogRecord:
    """A warning about a peer."""
    return record(1, logging.WARNING, f"session with 12D3KooW{'ABCDEFGHJK'[number]:A<44}: not a message")


@defence("one line of code cannot fill the disk", off=replacing(logs, "WARNINGS", (math.inf, math.inf)))
def test_one_place_in_the_code_cannot_fill_the_disk_with_logs() -> None:
    now = [100.0]
    throttle = Throttle(lambda: now[0])
    passed = 0
    for now[0] in range(DAY_S):
        passed += len(through(throttle, (record(1, logging.WARNING) for _ in range(2))))
    assert passed < 3000
    assert throttle.filter(record(2, logging.WARNING)), "another place is not held back"


@defence("a peer that floods the log hides no other", off=replacing(logs, "OF_A_PEER", (math.inf, math.inf)))
def test_a_peer_that_floods_the_log_hides_no_other() -> None:
    now = [100.0]
    per_s, burst = OF_A_PEER
    throttle = Throttle(lambda: now[0])
    assert len(through(throttle, (about(1) for _ in range(1000)))) == burst
    assert throttle.filter(other := about(2))
    assert vars(other)["suppressed"] == 1000 - burst
    now[0] += 1 / per_s
    assert throttle.filter(about(1))


def test_no_debug_record_is_dropped() -> None:
    throttle = Throttle()
    assert all(throttle.filter(record(1, logging.DEBUG)) for _ in range(100))


@pytest.mark.parametrize("arguments", [["--log-format", "xml", "model"], ["--log-level", "loud", "model"]])
def test_other_formats_and_levels_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(arguments) == 2
    assert arguments[1] in capsys.readouterr().err
