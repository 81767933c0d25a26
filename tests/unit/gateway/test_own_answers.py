"""Responses to this user's commands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from swarmnet.gateway.protocols.endpoint import LineStreamResponse


async def one_line() -> AsyncIterator[bytes]:
    yield b'{"token": 5, "text": "a"}\n'


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


@pytest.mark.parametrize("sent", [0, 1])
def test_a_client_that_leaves_early_frees_its_answer(sent: int) -> None:
    messages: list[Any] = []
    closed: list[str] = []

    async def send(message: Any) -> None:
        if len(messages) == sent:
            raise ConnectionResetError
        messages.append(message)

    async def respond() -> None:
        stack = AsyncExitStack()
        stack.callback(closed.append, "answer")
        with pytest.raises((OSError, ExceptionGroup)):
            await LineStreamResponse(one_line(), stack)({"type": "http"}, never, send)
        assert closed == ["answer"]

    asyncio.run(respond())
