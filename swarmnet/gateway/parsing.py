"""Parsing request bodies and JSON lines within bounded time and memory.

The length of a JSON body bounds neither, because three bytes can become an object of a hundred
bytes. So the strings, containers, fields, values and digits are counted before the body is parsed,
and validation ends at the first invalid value.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from swarmnet.gateway.errors import ApiError, validation_error
from swarmnet.gateway.protocols.schemas import StrictModel
from swarmnet_protocols.errors import ConfigError

BYTES_PER_TOKEN = 32
"""Most JSON bytes per token of the context. Russian with all letters escaped needs 24."""
MAX_TOKENS = 1 << 17
"""Longest context, in tokens, that the limits allow for. Prompts for longer contexts fit if they
are not escaped."""
SPARE_BYTES = 1 << 16
"""Bytes allowed in addition to the context's bytes."""
SPARE_VALUES = 1 << 15
"""Values allowed in addition to one for each token of the context."""
SPARE_QUOTES = 1 << 16
"""Quotation marks, escaped ones included, allowed in addition to one for two tokens of the
context."""
MAX_CONTAINERS = 1 << 14
"""Most objects and lists: four for each message of the longest chat."""
MAX_FIELDS = 1 << 15
MAX_DIGITS = 64
_ESCAPE = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}",
    re.DOTALL,
)
"""An escape in JSON: a whole one as the first group, or half of a surrogate pair."""
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
R = TypeVar("R", bound=StrictModel)


@dataclass(frozen=True)
class BodyParser:
    """Parses requests to a model with a context of ``max_length`` tokens."""

    max_length: int

    @property
    def max_bytes(self) -> int:
        return SPARE_BYTES + BYTES_PER_TOKEN * min(self.max_length, MAX_TOKENS)

    @property
    def max_quotes(self) -> int:
        return SPARE_QUOTES + min(self.max_length, MAX_TOKENS) // 2

    @property
    def max_values(self) -> int:
        return SPARE_VALUES + min(self.max_length, MAX_TOKENS)

    def parse(self, body: bytes, schema: type[R]) -> R:
        """Return the request in ``body``. Raises ``ApiError`` that names the first invalid field or
        exceeded limit."""
        return validated(self.fields(body), schema)

    def fields(self, body: bytes) -> dict[str, Any]:
        """Return the JSON object in ``body``. Raises ``ApiError``."""
        if len(body) > self.max_bytes:
            raise _too_large(f"the body is longer than {self.max_bytes} bytes")
        self._check_size(body)
        try:
            fields = _fields(body)
        except ValueError as error:  # its message has the position and quotes nothing
            raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from error
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is not a JSON object", "invalid_json")
        return fields

    def _check_size(self, body: bytes) -> None:
        outside = self._outside_strings(body)
        containers = outside.count(b"[") + outside.count(b"{")
        for count, limit, what in (
            (containers, MAX_CONTAINERS, "objects and lists"),
            (outside.count(b":"), MAX_FIELDS, "fields"),
            (outside.count(b",") + containers, self.max_values, "values"),
        ):
            if count > limit:
                raise _too_large(f"the body has more than {limit} {what}")
        if b"0" * (MAX_DIGITS + 1) in outside.translate(_DIGITS_TO_0):
            raise ApiError(400, f"a number has more than {MAX_DIGITS} digits", "invalid_json")

    def _outside_strings(self, body: bytes) -> bytes:
        parts = body.split(b'"', self.max_quotes + 1)
        if len(parts) > self.max_quotes + 1:
            raise _too_large(f"the body has more than {self.max_quotes} quotation marks")
        outside = []
        is_inside = False
        for part in parts:
            if not is_inside:
                outside.append(part)
                is_inside = True
            elif not part.endswith(b"\\") or (len(part) - len(part.rstrip(b"\\"))) % 2 == 0:
                is_inside = False  # the quotation mark after it is not escaped
        return b"".join(outside)


ANY_MODEL = BodyParser(MAX_TOKENS)
"""Reads lines for a model whose context is not known yet."""


def json_lines(
    path: Path, hint: str, parser: BodyParser = ANY_MODEL
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each after its number and its place in words.

    ``hint`` says what a line is. ``parser`` bounds the time and memory that a line takes. Raises
    ``ConfigError`` that names the first invalid line.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(parser.max_bytes + 1):
                number += 1
                if raw.strip():
                    where = f"line {number} of {path}"
                    try:
                        fields = parser.fields(raw)
                    except ApiError as error:
                        message = error.message.replace("the body", "it", 1)
                        raise ConfigError(f"{where}: {message}", hint=hint) from error
                    yield number, where, fields
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check the path") from error


def validated(fields: Mapping[str, Any], schema: type[R]) -> R:
    """Return the request with these fields. Raises ``ApiError`` that names an invalid one."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from error


def _fields(body: bytes) -> object:
    """Parse JSON; raises ``ValueError``. Half a character, as cutting a text makes it, becomes
    U+FFFD."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError:
        repaired = _ESCAPE.sub(lambda found: found[1] or b"\\ufffd", body)
        if repaired == body:
            raise
        return from_json(repaired, allow_inf_nan=False)


def _too_large(message: str) -> ApiError:
    return ApiError(413, message, "body_too_large")


def is_json(content_type: str) -> bool:
    """Return whether a ``Content-Type`` is JSON. Browsers send other types cross-origin without a
    preflight request."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
