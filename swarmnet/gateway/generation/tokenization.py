"""Tokenizing the texts and chats of requests, in a thread. Longer texts than the model's context
are refused."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.answer_grammars import Literals, answer_grammar, check_tools, is_free
from swarmnet.gateway.generation.answer_reader import AnswerReader
from swarmnet.gateway.generation.requests import ChatPrompt, OutputFormat, Tool
from swarmnet.gateway.generation.template_inputs import (
    template_messages,
    template_tools,
    template_variables,
)
from swarmnet.gateway.generation.tool_formats import AnswerForm, form_of
from swarmnet_client.batching.continuous_batching import BatchedModel
from swarmnet_client.model.grammar import BadGrammar, Grammar, GrammarCompiler
from swarmnet_client.model.sampling import word_ids
from swarmnet_protocols.models.text.chat_template import TemplateFailed, TemplateRefused, render_chat

CHARS_PER_TOKEN = 64
"""Most characters per position of the context; longer texts are refused before they are
tokenized."""
PIECE_CHARS = 1 << 14
"""Characters per piece when the tokens of a long text are counted. Tokenizing takes about 100 bytes
of memory per token, so the whole text could take too much."""
EXTRA_TOKENS = 16
"""Most tokens that a cut between two pieces adds to the count."""


T = TypeVar("T")


@dataclass(frozen=True)
class PreparedPrompt:
    """A tokenized prompt, and how its answer is written and read.

    - ``grammar``: None if every answer is fine.
    - ``form``: how the answer writes thoughts and calls; None if it writes neither.
    - ``thinks``: the prompt ends within the thoughts.
    - ``tools``: the tools that the answer may call.
    - ``marks``: texts of special tokens that the reader of the answer needs.
    - ``continues``: the answer continues the text of the prompt.
    - ``echo``: the text that precedes the answer; None for none.
    - ``is_empty``: nothing follows ``echo``.
    """

    ids: list[int]
    grammar: Grammar | None = None
    form: AnswerForm | None = None
    thinks: bool = False
    tools: tuple[Tool, ...] = ()
    marks: Mapping[int, str] = field(default_factory=dict)
    continues: bool = False
    echo: str | None = None
    is_empty: bool = False

    def reader(self, index: int) -> AnswerReader:
        """Return the reader of choice ``index``."""
        strings = {
            tool.name: frozenset(
                name
                for name, inner in (tool.parameters.get("properties") or {}).items()
                if isinstance(inner, dict) and inner.get("type") == "string"
            )
            for tool in self.tools
        }
        return AnswerReader(index, self.form, thinks=self.thinks, calls=bool(self.tools), strings=strings)


class PromptTokenizer:
    """The model's tokenizer on a thread of its own, so that long prompts do not block the event
    loop."""

    def __init__(self, served: BatchedModel) -> None:
        self._served = served
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        # This holds the interpreter for up to a second, and so belongs to the start.
        self._thread.submit(getattr, self, "_compiler")

    def close(self) -> None:
        """Stop the thread after the current text."""
        self._thread.shutdown(wait=False)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``. Raises ``ApiError`` for a text that is far too long for
        the context."""
        return await self.run(self._encode, text, special_tokens)

    async def encode_chat(self, chat: ChatPrompt, *, generation_prompt: bool) -> list[int]:
        """Return the token ids of a chat in the model's template. Raises ``ApiError`` if the
        template is missing, fails or refuses it."""
        return await self.run(self._encode_chat, chat, generation_prompt)

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words, at the beginning of a text and within."""
        return await self.run(word_ids, words, self._served.tokenizer) if words else ()

    async def prepare(self, chat: ChatPrompt, output: OutputFormat | None) -> PreparedPrompt:
        """Return the token ids of a chat, and how its answer is written and read. Raises
        ``ApiError``, also for tools and formats that no grammar can express."""
        return await self.run(self._prepare, chat, output)

    async def prepare_text(self, prompt: str | list[int], output: OutputFormat | None) -> PreparedPrompt:
        """Return the token ids of a text, and the grammar of its answer. Raises ``ApiError``."""
        return await self.run(self._prepare_text, prompt, output)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._served.tokenizer.decode, ids)

    def check_ids(self, ids: Collection[int], param: str) -> None:
        """Raise ``ApiError`` that names ``param`` if an id is not in the vocabulary."""
        vocab_size = self._served.vocabulary.size
        if ids and max(ids) >= vocab_size:
            raise ApiError(400, f"token ids go up to {vocab_size - 1}", "invalid_value", param=param)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call ``function`` in the thread, and return its result."""
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

    def _prepare_text(self, prompt: str | list[int], output: OutputFormat | None) -> PreparedPrompt:
        ids = self._encode(prompt, True) if isinstance(prompt, str) else prompt
        grammar = self._grammar(ChatPrompt(()), output, AnswerForm(), thinks=False)
        return PreparedPrompt(ids, grammar, continues=True)

    def _prepare(self, chat: ChatPrompt, output: OutputFormat | None) -> PreparedPrompt:
        form = self._form()
        text = self._render(chat, form, generation_prompt=True)
        thinks = bool(form.think[0]) and text.rstrip().endswith(form.think[0])
        ids = self._encode(text, False)
        grammar = self._grammar(chat, output, form, thinks=thinks)
        calls = bool(chat.tools) and chat.choice.mode != "none"
        if not calls and not form.think[1]:
            return PreparedPrompt(ids, grammar)
        marks = {
            token: each.content
            for token, each in self._added.items()
            if each.special and any(each.content in mark for mark in form.marks)
        }
        return PreparedPrompt(ids, grammar, form, thinks, chat.tools if calls else (), marks)

    def _form(self) -> AnswerForm:
        try:
            return form_of(self._served.tokenizer.get_chat_template())
        except ValueError:
            return AnswerForm()

    def _grammar(
        self, chat: ChatPrompt, output: OutputFormat | None, form: AnswerForm, *, thinks: bool
    ) -> Grammar | None:
        try:
            check_tools(chat)
            if is_free(chat, output, form):
                return None
            special = {
                each.content: token for token, each in self._added.items() if self._compiler.is_special(token)
            }
            text, limits = answer_grammar(chat, output, form, Literals(special), thinks=thinks)
            return self._compiler.compile(text, limits)
        except BadGrammar as error:
            raise ApiError(
                400, str(error), "invalid_value", param="tools" if output is None else "response_format"
            ) from error

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        try:
            return GrammarCompiler(self._served.vocabulary)
        except (ValueError, AttributeError) as error:
            raise BadGrammar(f"grammars do not support the tokenizer of this model: {error}") from error

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        """The tokens that were added to the vocabulary, by their ids."""
        backend = getattr(self._served.tokenizer, "backend_tokenizer", None)
        return {} if backend is None else backend.get_added_tokens_decoder()

    def _encode_chat(self, chat: ChatPrompt, generation_prompt: bool) -> list[int]:
        return self._encode(self._render(chat, self._form(), generation_prompt=generation_prompt), False)

    def _render(self, chat: ChatPrompt, form: AnswerForm, *, generation_prompt: bool) -> str:
        tokenizer = self._served.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", "no_chat_template")
        try:
            return render_chat(
                tokenizer,
                template_messages(chat, form),
                add_generation_prompt=generation_prompt,
                max_chars=self._max_chars,
                tools=template_tools(chat) if form.knows_tools else None,
                variables=template_variables(chat),
            )
        except TemplateRefused as error:
            raise ApiError(400, str(error), "invalid_value", param="messages") from error
        except TemplateFailed as error:
            raise ApiError(500, str(error), "chat_template_failed", "server_error") from error
