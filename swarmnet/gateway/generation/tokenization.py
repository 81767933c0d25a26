"""Tokenizing the texts and chats of requests, in a thread. Longer texts than the model's context
are refused."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.requests import ChatMessage
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_protocols.models.text.chat_template import TemplateFailed, TemplateRefused, render_chat

CHARS_PER_TOKEN = 64
"""Most characters per position of the context; longer texts are refused before they are
tokenized."""
PIECE_CHARS = 1 << 14
"""Characters per piece when the tokens of a long text are counted. Tokenizing takes about 100 bytes
of memory per token, so the whole text could take too much."""
EXTRA_TOKENS = 16
"""Most tokens that a cut between two pieces adds to the count."""


class PromptTokenizer:
    """The model's tokenizer on a thread of its own, so that long prompts do not block the event
    loop."""

    def __init__(self, served: BatchedModel) -> None:
        self._served = served
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """Stop the thread after the current text."""
        self._thread.shutdown(wait=False)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``. Raises ``ApiError`` for a text that is far too long for
        the context."""
        return await self._run(self._encode, text, special_tokens)

    async def encode_chat(self, messages: Sequence[ChatMessage], *, generation_prompt: bool) -> list[int]:
        """Return the token ids of a chat in the model's template. Raises ``ApiError`` if the
        template is missing, fails or refuses it."""
        return await self._run(self._encode_chat, messages, generation_prompt)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._served.tokenizer.decode, ids)

    def check_ids(self, ids: Collection[int], param: str) -> None:
        """Raise ``ApiError`` that names ``param`` if an id is not in the vocabulary."""
        vocab_size = self._served.vocabulary.size
        if ids and max(ids) >= vocab_size:
            raise ApiError(400, f"token ids go up to {vocab_size - 1}", "invalid_value", param=param)

    async def _run(self, function: Callable[..., list[int]], *arguments: object) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    @property
    def _max_chars(self) -> int:
        return CHARS_PER_TOKEN * self._served.max_length

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        if len(text) > self._max_chars or self._is_too_long(text):
            raise ApiError(
                400, f"{len(text)} characters do not fit into this model", "context_length_exceeded"
            )
        ids: list[int] = self._served.tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def _is_too_long(self, text: str) -> bool:
        """Return whether a long text exceeds the context, even without the tokens that cutting it
        may have added."""
        if len(text) <= PIECE_CHARS:
            return False
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            count += len(self._served.tokenizer.encode(piece, add_special_tokens=False)) - EXTRA_TOKENS
            if count > self._served.max_length:
                return True
        return False

    def _encode_chat(self, messages: Sequence[ChatMessage], generation_prompt: bool) -> list[int]:
        tokenizer = self._served.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", "no_chat_template")
        try:
            text = render_chat(
                tokenizer,
                [{"role": message.role, "content": message.text} for message in messages],
                add_generation_prompt=generation_prompt,
                max_chars=self._max_chars,
            )
        except TemplateRefused as error:
            raise ApiError(400, str(error), "invalid_value", param="messages") from error
        except TemplateFailed as error:
            raise ApiError(500, str(error), "chat_template_failed", "server_error") from error
        return self._encode(text, False)
