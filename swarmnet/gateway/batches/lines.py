"""The lines of a batch: requests as OpenAI's batches have them, or plain prompts.

A line is ``{"custom_id", "method", "url", "body"}``. A plain line is a body with ``prompt`` or
``messages``, and perhaps ``custom_id``.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from swarmnet.gateway.parsing import ANY_MODEL, BodyParser, json_lines
from swarmnet.gateway.protocols.chat_completions import CHAT_COMPLETIONS
from swarmnet.gateway.protocols.completions import COMPLETIONS
from swarmnet_protocols.errors import ConfigError

MAX_ID_CHARS = 512
WINDOW = 4096
"""Lines that are sorted together. With more, lines share more prefixes and take more memory."""
PREFIX_CHARS = 4096
"""Characters of a prompt by which lines are sorted."""
LINE_HINT = 'a line is {"prompt": TEXT}, {"messages": [...]}, or as in OpenAI\'s batches'
ENDPOINTS = {each.path: each for each in (CHAT_COMPLETIONS, COMPLETIONS)}
"""The endpoints that a line may name."""


@dataclass(frozen=True)
class BatchLine:
    """One request. ``id``: a hash of the request and its model."""

    custom_id: str
    url: str
    body: dict[str, Any]
    id: str

    @property
    def model(self) -> str:
        """The named model as JSON: it may be no text until the line is checked."""
        return json.dumps(self.body.get("model"))[:PREFIX_CHARS]

    @property
    def prefix(self) -> tuple[str, str, str]:
        """The sort key. It puts lines of one model with a common beginning next to each other."""
        prompt = self.body.get("messages", self.body.get("prompt"))
        return self.model, self.url, json.dumps(prompt)[:PREFIX_CHARS]


def read_lines(path: Path, model: str, parser: BodyParser = ANY_MODEL) -> Iterator[BatchLine]:
    """Yield the requests of a file, as ``json_lines`` reads them.

    ``model``: the model that answers if a line names none. Raises ``ConfigError`` that names the
    first invalid line.
    """
    for number, where, fields in json_lines(path, LINE_HINT, parser):
        yield _line(fields, where, f"line-{number}", model)


def _line(fields: dict[str, Any], where: str, usual_id: str, model: str) -> BatchLine:
    custom_id = fields.pop("custom_id", usual_id)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        message = f"{where}: custom_id is a text of 1 to {MAX_ID_CHARS} characters"
        raise ConfigError(message, hint="give the line another custom_id, or none")
    if "url" in fields or "body" in fields:
        url, body = fields.get("url"), fields.get("body")
    else:
        url, body = (CHAT_COMPLETIONS if "messages" in fields else COMPLETIONS).path, fields
    if url not in ENDPOINTS:
        message = f"{where}: url is one of {', '.join(ENDPOINTS)}"
        raise ConfigError(message, hint="correct the line, or write no url and no body")
    if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
        raise ConfigError(f"{where} has no prompt", hint=LINE_HINT)
    content = json.dumps([custom_id, url, body, model], sort_keys=True).encode()
    return BatchLine(custom_id, url, body, f"batch_req_{hashlib.sha256(content).hexdigest()[:24]}")


def checked_ids(lines: Iterable[BatchLine], most: int = sys.maxsize) -> dict[str, str]:
    """Return the id of each line by its custom_id. Raises ``ConfigError`` if two lines share a
    custom_id, if there are none, or more than ``most``."""
    ids: dict[str, str] = {}
    for line in lines:
        if line.custom_id in ids:
            message = f"two lines have the custom_id {line.custom_id[:64]!r}"
            raise ConfigError(message, hint="answers are found by it: make it unique, or leave it out")
        ids[line.custom_id] = line.id
        if len(ids) > most:
            raise ConfigError(f"a batch has at most {most} lines", hint="make several files of it")
    if not ids:
        raise ConfigError("there are no prompts in the file", hint=LINE_HINT)
    return ids


def windows_by_prefix(lines: Iterable[BatchLine]) -> Iterator[list[BatchLine]]:
    """Yield lines in sorted parts. Hosts compute the common beginning of successive lines once."""
    rest = iter(lines)
    while window := sorted(islice(rest, WINDOW), key=lambda line: line.prefix):
        yield window
