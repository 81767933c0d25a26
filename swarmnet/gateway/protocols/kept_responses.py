"""Conversations that a later request continues by the id of their last response.

Only texts are kept here. Hosts keep the KV caches of the conversation (prefix reuse), so the next
turn computes its own tokens only.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.requests import ChatMessage

MAX_RESPONSES = 256
"""Most responses kept for one key; the oldest go first."""
MAX_CHARS = 4 << 20
"""Most characters of all responses and conversations kept for one key, with every field of their
messages."""
KEPT_S = 3600.0
"""Seconds for which a response is kept. People take breaks; an agent's next turn comes sooner."""


@dataclass(frozen=True)
class KeptResponse:
    """A response as it was sent, and its conversation. ``until_s``: when it is forgotten."""

    fields: dict[str, Any]
    messages: tuple[ChatMessage, ...]
    chars: int
    until_s: float


class KeptResponses:
    """The responses of one key by their ids."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._chars = 0

    def keep(self, fields: dict[str, Any], messages: Sequence[ChatMessage]) -> None:
        """Keep a response, and forget old ones beyond the limits."""
        chars = len(json.dumps(fields)) + sum(len(repr(message)) for message in messages)
        self._kept[fields["id"]] = KeptResponse(fields, tuple(messages), chars, self._clock() + KEPT_S)
        self._chars += chars
        self._forget_old()

    def find(self, response_id: str) -> KeptResponse:
        """Return a response. Raises ``ApiError`` if it is not kept."""
        self._forget_old()
        if (found := self._kept.get(response_id)) is None:
            message = f"there is no response {response_id[:64]!r}: responses are kept for {KEPT_S / 60:g} min"
            raise ApiError(404, message, "previous_response_not_found", param="previous_response_id")
        return found

    def forget(self, response_id: str) -> None:
        """Forget a response. Raises ``ApiError`` if it is not kept."""
        self._chars -= self.find(response_id).chars
        del self._kept[response_id]

    def _forget_old(self) -> None:
        while self._kept and (
            len(self._kept) > MAX_RESPONSES
            or self._chars > MAX_CHARS
            or next(iter(self._kept.values())).until_s <= self._clock()
        ):
            _, oldest = self._kept.popitem(last=False)
            self._chars -= oldest.chars
