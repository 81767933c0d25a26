"""From the bytes of a request to its fields, on the event loop. No bytes may hold it for long, or take much memory.

A body's length bounds neither: three bytes of JSON can be an object of a hundred. So the values in it are counted before
any is made, and what is made is checked up to the first thing that is wrong.
"""

from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from swarmnet.gateway.failures import ApiError, of_validation
from swarmnet.gateway.schemas import Strict

BYTES_PER_TOKEN = 32
"""The JSON of a prompt has fewer for each of its tokens: Russian with every letter escaped has 24."""
MAX_TOKENS = 1 << 17
"""Tokens of the longest prompt that a request has room for in any form; for longer contexts, in the usual ones."""
SPARE_BYTES = 1 << 16
SPARE_VALUES = 1 << 15
"""Values besides one for each token of the context."""
SPARE_QUOTES = 1 << 16
"""Quotation marks, also escaped ones in texts, besides one for two tokens of the context."""
MAX_CONTAINERS = 1 << 14
"""Objects and lists: four for each of the most messages."""
MAX_FIELDS = 1 << 15
MAX_DIGITS = 64
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
R = TypeVar("R", bound=Strict)


@dataclass(frozen=True)
class BodyBounds:
    """What a request may have for a model that takes ``max_length`` tokens."""

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

    def read(self, body: bytes, kind: type[R]) -> R:
        """The request in ``body``. Raises ``ApiError`` that names the first thing that is wrong with it."""
        if len(body) > self.max_bytes:
            raise _too_large(f"the body is longer than {self.max_bytes} bytes")
        self._check_values(body)
        try:
            fields = from_json(body, allow_inf_nan=False)
        except ValueError as error:  # says the place, and quotes nothing
            raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from error
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is not a JSON object", "invalid_json")
        try:
            return kind.model_validate(fields)
        except ValidationError as error:
            raise of_validation(error) from error

    def _check_values(self, body: bytes) -> None:
        outside = self._outside_strings(body)
        containers = outside.count(b"[") + outside.count(b"{")
        for count, most, things in (
            (containers, MAX_CONTAINERS, "objects and lists"),
            (outside.count(b":"), MAX_FIELDS, "fields"),
            (outside.count(b",") + containers, self.max_values, "values"),
        ):
            if count > most:
                raise _too_large(f"the body has more than {most} {things}")
        if b"0" * (MAX_DIGITS + 1) in outside.translate(_DIGITS_TO_0):
            raise ApiError(400, f"a number has more than {MAX_DIGITS} digits", "invalid_json")

    def _outside_strings(self, body: bytes) -> bytes:
        """The JSON without what is in strings."""
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


def _too_large(message: str) -> ApiError:
    return ApiError(413, message, "body_too_large")


def is_json(content_type: str) -> bool:
    """Whether a header says so. Web pages can send anything else without asking first."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
