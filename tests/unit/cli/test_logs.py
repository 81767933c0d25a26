"""Logs: each entry is one line in one format with its fields, has no secrets, and strangers cannot
make the log large."""

import json
import logging
import re
from collections.abc import Iterator

import pytest

from swarmnet import cli
from swarmnet.logs import BURST, WINDOW_S, Throttle, configure

INVITE = "swn1" + "aB3_" * 20
KEY = "-----BEGIN PRIVATE KEY-----\nMC4CAQ\n-----END PRIVATE KEY-----"
_log = logging.getLogger("swarmnet_node.test")


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    yield
    configure(log_format="text", level="warning")


def record(line: int, created: float, level: int = logging.INFO) -> logging.LogRecord:
    made = logging.LogRecord("name", level, "file.py", line, "text", (), None)
    made.created = created
    return made


def test_json_is_one_object_a_line_with_fields_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    configure(log_format="json", level="info")
    _log.info("session refused", extra={"reason": "leaving", "sessions": 3})
    try:
        raise ValueError("bad")
    except ValueError:
        _log.exception("handler failed")
    logging.getLogger("hivemind.dht").error("from a library")
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


def test_one_place_in_the_code_cannot_fill_the_disk_with_logs() -> None:
    throttle = Throttle()
    passed = [throttle.filter(record(1, 100.0)) for _ in range(10_000)]
    assert sum(passed) == BURST
    assert throttle.filter(record(2, 100.0)), "another place is not held back"
    later = record(1, 100.0 + WINDOW_S)
    assert throttle.filter(later)
    assert later.__dict__["suppressed"] == 10_000 - BURST


def test_no_debug_record_is_dropped() -> None:
    throttle = Throttle()
    assert all(throttle.filter(record(1, 100.0, logging.DEBUG)) for _ in range(2 * BURST))


@pytest.mark.parametrize("arguments", [["--log-format", "xml", "model"], ["--log-level", "loud", "model"]])
def test_other_formats_and_levels_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(arguments) == 2
    assert arguments[1] in capsys.readouterr().err
