"""An answer through an endpoint that runs on this machine (``swarmnet/resident.py``)."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit

from swarmnet.cli.chat.generation import Pieces, RunAnswer, SamplingOptions, Screen, Stopped
from swarmnet.resident import PATH, Resident
from swarmnet_protocols.errors import SwarmnetError

CONNECT_S = 5.0
"""Seconds in which the endpoint has to begin its response. It does so before it computes."""
MAX_LINE_BYTES = 1 << 20


def ask(
    resident: Resident, prompt: Mapping[str, Any], sampling: SamplingOptions, screen: Screen
) -> RunAnswer | None:
    """Return the answer to ``prompt``, a ``text`` or ``messages``; ``screen`` shows it piece by
    piece. None if the endpoint does not take the prompt, or fails before the first token.

    Raises ``Stopped`` for Ctrl-C, and ``SwarmnetError`` for a later failure.
    """
    fields = {name: getattr(sampling, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    body = {**prompt, **fields, "speculate": sampling.speculate}
    url = urlsplit(resident.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=CONNECT_S)
    with closing(connection):
        try:
            headers = {"authorization": f"Bearer {resident.key}", "content-type": "application/json"}
            given = {name: value for name, value in body.items() if value is not None}
            connection.request("POST", PATH, json.dumps(given), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                return None
            if connection.sock is not None:
                connection.sock.settimeout(None)
            return _read(response, screen)
        except (OSError, ValueError, http.client.HTTPException):
            return None


def _read(response: http.client.HTTPResponse, screen: Screen) -> RunAnswer | None:
    total = 0
    with ExitStack() as waiting:
        prefilled = waiting.enter_context(screen.prefill())
        pieces = Pieces(screen.show, waiting.close)
        try:
            for line in _lines(response):
                if "error" in line:
                    if not pieces.token_ids:
                        return None
                    raise SwarmnetError(str(line["error"]), hint=str(line.get("hint", "")))
                if "done" in line:
                    total = int(line["total"])
                    prefilled(int(line["done"]), total)
                    continue
                if "token" in line:
                    pieces.token(int(line["token"]))
                pieces.text(str(line["text"]))
                if "report" in line:
                    return pieces.answer(int(line["prompt_tokens"]), line["report"])
        except KeyboardInterrupt:
            raise Stopped(pieces.answer(total, {})) from None
    if not pieces.token_ids:
        return None
    raise SwarmnetError("the endpoint on this machine ended within the answer", hint="ask again")


def _lines(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline(MAX_LINE_BYTES):
        yield json.loads(line)
