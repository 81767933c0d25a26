"""Embeddings, echoed prompts, Anthropic's messages, OpenAI's responses and Ollama's API over whole
nodes: official clients in virtual time where they can be given a transport."""

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import ollama
import openai
import pytest
import torch

from swarmnet.gateway.accounts import KeyAccounts
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.requests import ChatMessage
from swarmnet.gateway.protocols import kept_responses, messages
from swarmnet.gateway.protocols.kept_responses import KEPT_S
from tests.defences import defence, replacing
from tests.support.models.rounding import TINY_TERMS, assert_near
from tests.support.swarm.gateway import Caller, completion_body, continued, refused, served, words
from tests.support.swarm.swarm_lab import Lab, Reference

PROMPT = [5, 6, 7]
TEXT = words(PROMPT)
TOKENS = 6
SAID: dict[str, Any] = {"model": "model", "temperature": 0}
GREEDY: dict[str, Any] = {"model": "model", "extra_body": {"temperature": 0}}
"""As ``SAID``: Anthropic's client has no parameter for the temperature."""
LONG = " ".join(f"w{2 + number}" for number in range(60))


def within(tiny: Reference, work: Callable[[Caller], Awaitable[Any]], **options: Any) -> Any:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        return await work(caller)

    return served(tiny, scenario, **options)


def anthropics(caller: Caller) -> Any:
    return anthropic.AsyncAnthropic(base_url="http://127.0.0.1", **_options(caller))


def openais(caller: Caller) -> Any:
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", **_options(caller))


def _options(caller: Caller) -> dict[str, Any]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(caller.app))
    return {"api_key": "none", "http_client": http, "max_retries": 0}


@torch.inference_mode()
def whole(tiny: Reference, ids: list[int]) -> Any:
    return tiny.model(torch.tensor([ids]), output_hidden_states=True)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echoed_prompt_has_the_models_log_probabilities(tiny: Reference, max_tokens: int) -> None:
    async def work(caller: Caller) -> Any:
        body = completion_body(PROMPT, max_tokens=max_tokens, echo=True, logprobs=1)
        return (await caller.post("/v1/completions", body)).json()["choices"][0]

    choice = within(tiny, work)
    answer = tiny.greedy(PROMPT, max_tokens) if max_tokens else []
    assert choice["text"] == TEXT + continued(answer)
    found = choice["logprobs"]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    ids = PROMPT + answer
    rows = whole(tiny, ids).logits[0].log_softmax(-1)
    expected = torch.stack([row[token] for row, token in zip(rows, ids[1:], strict=False)])
    assert_near(torch.tensor(found["token_logprobs"][1:]), expected)


@pytest.mark.parametrize("dimensions", [None, 4])
def test_embeddings_are_means_of_the_models_states(tiny: Reference, dimensions: int | None) -> None:
    async def work(caller: Caller) -> Any:
        wanted = {"model": "model", "input": [TEXT, "w9"]}
        cut = {} if dimensions is None else {"dimensions": dimensions}
        found = await openais(caller).embeddings.create(**wanted, **cut)
        theirs = await caller.post("/api/embed", {**wanted, **cut})
        return [each.embedding for each in found.data], theirs.json()["embeddings"], found.usage

    ours, theirs, usage = within(tiny, work)
    assert usage.prompt_tokens == 4
    for ids, one, other in zip((PROMPT, [9]), ours, theirs, strict=True):
        mean = whole(tiny, ids).hidden_states[-1][0].mean(0)[:dimensions]
        for found in (one, other):
            assert_near(torch.tensor(found), mean / mean.norm(), TINY_TERMS)


def test_anthropics_client_reads_messages_whole_and_streamed(tiny: Reference) -> None:
    said: Any = {**GREEDY, "max_tokens": TOKENS, "messages": [{"role": "user", "content": TEXT}]}

    async def work(caller: Caller) -> Any:
        client = anthropics(caller)
        answer = await client.messages.create(**said)
        again = []
        async with client.messages.stream(**said) as stream:
            again = [text async for text in stream.text_stream]
            last = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="model", messages=said["messages"])
        return answer, "".join(again), last, counted

    answer, text, last, counted = within(tiny, work)
    assert answer.content[0].text == last.content[0].text == text
    assert (answer.stop_reason, last.stop_reason) == ("max_tokens", "max_tokens")
    assert answer.usage.input_tokens == last.usage.input_tokens == counted.input_tokens
    assert answer.usage.output_tokens == last.usage.output_tokens == TOKENS


@defence(
    "the stamp of a client does not keep a prompt from the hosts' caches",
    off=replacing(messages, "_STAMP", re.compile("never")),
)
def test_a_changing_stamp_leaves_the_caches_of_a_prompt(tiny: Reference) -> None:
    async def work(caller: Caller) -> list[int]:
        found = []
        for stamp in ("w80", "w81"):
            head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch= {stamp} ;"}
            rule = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}
            answer = await anthropics(caller).messages.create(
                **GREEDY,
                max_tokens=1,
                system=[head, rule],
                messages=[{"role": "user", "content": TEXT}],
            )
            found.append(answer.usage.cache_read_input_tokens or 0)
        return found

    first, again = within(tiny, work)
    assert first == 0
    assert again >= 60


def test_anthropics_errors_have_their_own_shape(tiny: Reference) -> None:
    async def work(caller: Caller) -> Any:
        client = anthropics(caller)
        found = []
        for content in ("w5 " * 600, [{"type": "image", "source": {}}]):
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(
                    **GREEDY, max_tokens=1, messages=[{"role": "user", "content": content}]
                )
            found.append(caught.value.body)
        return found

    long, image = within(tiny, work)
    assert (long["type"], long["error"]["type"]) == ("error", "invalid_request_error")
    assert "prompt is too long" in long["error"]["message"]
    assert "text only, no image" in image["error"]["message"]


def test_responses_continue_a_kept_conversation(tiny: Reference) -> None:
    async def work(caller: Caller) -> Any:
        client = openais(caller)
        first = await client.responses.create(**SAID, input=LONG, max_output_tokens=TOKENS)
        continued: Any = {"input": "w8", "previous_response_id": first.id, "max_output_tokens": TOKENS}
        stream = await client.responses.create(**SAID, **continued, stream=True)
        events = [event async for event in stream]
        last = events[-1].response
        said = [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "w8"},
        ]
        alone = await client.responses.create(**SAID, input=said, max_output_tokens=TOKENS)
        kept = await client.responses.retrieve(last.id)
        await client.responses.delete(last.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**SAID, input="w8", previous_response_id=last.id)
        return first, events, last, alone, kept

    first, events, last, alone, kept = within(tiny, work)
    assert last.status == alone.status
    assert last.output_text == alone.output_text == kept.output_text
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == (
        last.output_text
    )
    assert last.usage.input_tokens == alone.usage.input_tokens > first.usage.input_tokens
    assert last.usage.input_tokens_details.cached_tokens > 0


@defence(
    "a key continues no conversation of another key",
    off=replacing(KeyAccounts, "__missing__", lambda self, _: self.get("") or self._add("")),
)
def test_a_key_does_not_continue_the_conversation_of_another(tiny: Reference) -> None:
    async def work(caller: Caller) -> Any:
        body = {**SAID, "input": TEXT, "max_output_tokens": 1}
        found = (await caller.post("/v1/responses", body, "alices-key")).json()
        body["previous_response_id"] = found["id"]
        own = await caller.post("/v1/responses", body, "alices-key")
        other = await caller.post("/v1/responses", body, "bobs-secret")
        assert other.status_code == 404
        return own.status_code, refused(other)

    own, other = within(tiny, work, keys={"alice": "alices-key", "bob": "bobs-secret"})
    assert own == 200
    assert other == (404, "previous_response_id", "previous_response_not_found")


def test_ollamas_requests_stream_lines(tiny: Reference) -> None:
    body: dict[str, Any] = {
        "model": "model:latest",
        "options": {"temperature": 0, "num_predict": TOKENS, "top_k": 40},
    }
    chat = {**body, "messages": [{"role": "user", "content": TEXT}]}

    async def work(caller: Caller) -> Any:
        streamed = [json.loads(line) for line in (await caller.post("/api/chat", chat)).text.splitlines()]
        answer = (await caller.post("/api/chat", {**chat, "stream": False})).json()
        raw = await caller.post("/api/generate", {**body, "prompt": TEXT, "raw": True, "stream": False})
        error = await caller.post("/api/chat", {**chat, "options": {"mirostat": 2}})
        tags = (await caller.http.get("/api/tags")).json()
        shown = (await caller.post("/api/show", {"model": "model"})).json()
        return streamed, answer, raw.json(), error, tags, shown

    streamed, answer, raw, error, tags, shown = within(tiny, work)
    parts = [ollama.ChatResponse(**line) for line in streamed]
    assert "".join(part.message.content or "" for part in parts) == answer["message"]["content"]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == answer["done_reason"] == "length"
    assert parts[-1].eval_count == answer["eval_count"] == TOKENS
    assert raw["response"] == continued(tiny.greedy(PROMPT, TOKENS))
    assert (error.status_code, error.json()) == (400, {"error": "Unsupported parameter: 'options.mirostat'"})
    assert ollama.ListResponse(**tags).models[0].model == "model:latest"
    assert "completion" in (ollama.ShowResponse(**shown).capabilities or [])


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_RESPONSES", 2), ("MAX_CHARS", 250), ("KEPT_S", 0.5)], ids=str
)
def test_kept_responses_are_bounded(limit: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, limit, value)
    now = 0.0
    kept = kept_responses.KeptResponses(lambda: now)
    for name in "abc":
        kept.keep({"id": name}, [ChatMessage("user", "1234")])
    now = 1.0
    found = []
    for name in "abc":
        try:
            kept.find(name)
            found.append(name)
        except ApiError:
            continue
    assert found == ([] if limit == "KEPT_S" else ["b", "c"])
    assert KEPT_S > 60


def test_kept_responses_count_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, "MAX_CHARS", 250)
    kept = kept_responses.KeptResponses(lambda: 0.0)
    kept.keep({"id": "a", "instructions": "x" * 250}, [])
    with pytest.raises(ApiError):
        kept.find("a")
