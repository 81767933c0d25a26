"""Limits of a gateway: places, quotas of keys, and the release of both when a client leaves."""

import asyncio
from typing import Any

import pytest

from swarmnet.gateway.accounts import Account, Quota
from swarmnet.gateway.generation.tokenization import PIECE_CHARS, PromptTokenizer
from swarmnet_client.batching.continuous_batching import BatchLimits
from swarmnet_client.batching.sequences import SequenceGroup
from tests.defences import defence, nothing, replacing
from tests.support.swarm.gateway import Caller, chat_body, completion_body, refused, served
from tests.support.swarm.swarm_lab import Lab, Reference

TOKENS = 8


def test_remote_work_ends_when_the_client_of_a_stream_leaves(tiny: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> None:
        async with caller.stream("/v1/chat/completions", chat_body(max_tokens=400, stream=True)) as stream:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 4:
                    break
        load = caller.served.batcher.load
        assert (load.active, load.waiting) == (0, 0)
        await asyncio.sleep(1)
        forwards = lab.nodes["a"].status().host.forwards
        await asyncio.sleep(10)
        assert lab.nodes["a"].status().host.forwards == forwards

    served(tiny, scenario)


@defence("a client that leaves ends its generation", off=replacing(SequenceGroup, "leave", nothing))
def test_generation_ends_when_the_client_of_a_whole_response_leaves(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        batcher = caller.served.batcher
        async with caller.stream("/v1/completions", completion_body(max_tokens=400)):
            await asyncio.sleep(0.5)
            assert batcher.load.active == 1
        assert batcher.load.active == 0

    served(tiny, scenario)


def test_requests_beyond_the_queue_are_refused_with_retry_after(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        loop = asyncio.get_running_loop()
        took: list[float] = []

        async def ask(number: int) -> Any:
            started = loop.time()
            answer = await caller.complete([number + 2], max_tokens=TOKENS)
            took.append(loop.time() - started if answer.status_code == 503 else 0.0)
            return answer

        answers = await asyncio.gather(*map(ask, range(40)))
        good = [answer for answer in answers if answer.status_code == 200]
        busy = [answer for answer in answers if answer.status_code == 503]
        assert len(good) >= 8
        assert len(good) + len(busy) == 40
        assert all(
            refused(answer)[2] == "overloaded" and 1 <= int(answer.headers["retry-after"]) <= 60
            for answer in busy
        )
        assert max(took) < 0.1
        return len(busy)

    assert served(tiny, scenario, limits=BatchLimits(active=4, waiting=4)) > 20


QUOTAS = {
    "requests": (Quota(requests_per_minute=2), "rate_limit_exceeded", 30),
    "tokens": (Quota(tokens_per_minute=15), "rate_limit_exceeded", 24),
}


@defence("keys have a quota", off=replacing(Account, "_refusal", nothing), name="requests")
@pytest.mark.parametrize("name", QUOTAS)
def test_a_quota_limits_its_key_only(tiny: Reference, name: str) -> None:
    quota, code, wait_s = QUOTAS[name]
    body = {"model": "model", "prompt": [5, 6], "max_tokens": TOKENS, "ignore_eos": True}

    async def scenario(_lab: Lab, caller: Caller) -> None:
        async def ask(key: str = "alices-key") -> Any:
            return await caller.post("/v1/completions", body, key)

        assert [(await ask()).status_code for _ in range(2)] == [200, 200]
        over = await ask()
        assert over.status_code == 429
        assert refused(over) == (429, None, code)
        assert abs(int(over.headers["retry-after"]) - wait_s) <= 1
        assert (await ask("bobs-secret")).status_code == 200
        await asyncio.sleep(int(over.headers["retry-after"]))
        assert (await ask()).status_code == 200

    served(tiny, scenario, quota=quota, keys={"alice": "alices-key", "bob": "bobs-secret"})


def test_a_quota_limits_concurrent_requests(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> list[int]:
        answers = await asyncio.gather(*(caller.complete(max_tokens=TOKENS) for _ in range(3)))
        late = await caller.complete(max_tokens=1)
        assert [refused(answer)[2] for answer in answers if answer.status_code == 429] == [
            "concurrency_limit_exceeded"
        ]
        return sorted([*(answer.status_code for answer in answers), late.status_code])

    assert served(tiny, scenario, quota=Quota(concurrent=2)) == [200, 200, 200, 429]


@pytest.mark.parametrize(
    ("quota", "code"),
    [
        (Quota(concurrent=3), "concurrency_limit_exceeded"),
        (Quota(requests_per_minute=3), "rate_limit_exceeded"),
    ],
)
def test_every_choice_counts_in_the_quota(tiny: Reference, quota: Quota, code: str) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        first = asyncio.create_task(caller.complete(["w5", "w6"], max_tokens=TOKENS))
        await asyncio.sleep(0.1)
        assert refused(await caller.chat(n=2, max_tokens=1)) == (429, None, code)
        assert (await caller.chat(max_tokens=1)).status_code == 200
        assert (await first).status_code == 200
        await asyncio.sleep(60)  # a key beyond its quota is refused before its request is read
        never = await caller.chat(n=4, max_tokens=1)
        assert refused(never) == (400, "n", "invalid_value")
        assert "3 choices at once" in never.json()["error"]["message"]

    served(tiny, scenario, quota=quota)


def test_every_choice_uses_the_tokens_of_its_prompt(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> list[int]:
        answers = [await caller.complete([5] * 20, n=2, max_tokens=1) for _ in range(2)]
        return [answer.status_code for answer in answers]

    assert served(tiny, scenario, quota=Quota(tokens_per_minute=40)) == [200, 429]
    assert served(tiny, scenario, quota=Quota(tokens_per_minute=44)) == [200, 200]


def test_more_choices_than_the_batcher_can_hold_are_invalid(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        assert refused(await caller.complete(n=5, max_tokens=1)) == (400, "n", "invalid_value")
        assert (await caller.complete(n=4, max_tokens=1)).status_code == 200
        first = asyncio.create_task(caller.complete(n=2, max_tokens=TOKENS))
        await asyncio.sleep(0.1)
        assert refused(await caller.complete(n=3, max_tokens=1)) == (503, None, "overloaded")
        assert (await first).status_code == 200

    served(tiny, scenario, limits=BatchLimits(active=2, waiting=2))


def test_a_choice_ended_by_a_stop_string_raises_the_batchers_estimate(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        batcher = caller.served.batcher
        batcher._room = 1.0  # as after a shortage
        answer = await caller.complete(max_tokens=400, stop=" ")
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert batcher.load.room == 2.0

    served(tiny, scenario)


def test_only_health_needs_no_key(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        paths = ["/v1/models", "/metrics", "/version", "/openapi.json"]
        assert [(await caller.http.get(path)).status_code for path in paths] == [401] * 4
        assert (await caller.chat()).status_code == 401
        assert (await caller.http.get("/health")).status_code == 200

    served(tiny, scenario, keys={"alice": "alices-key"})


def test_each_protocol_hears_refusals_in_its_own_shape(tiny: Reference) -> None:
    """Also those that no endpoint sees: a wrong key, and a body that is too long."""

    async def scenario(_lab: Lab, caller: Caller) -> Any:
        found = []
        for path in ("/v1/messages", "/api/chat", "/v1/responses"):
            for key, body in (("wrong", b"{}"), ("alices-key", bytes(1 << 20))):
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                answer = await caller.http.post(path, content=body, headers=headers)
                found.append((answer.status_code, answer.json()))
        return found

    found = served(tiny, scenario, keys={"alice": "alices-key"})
    assert [status for status, _ in found] == [401, 413] * 3
    bodies = [body for _, body in found]
    assert all(body["type"] == "error" for body in bodies[:2])
    assert [body["error"]["type"] for body in bodies[:2]] == ["authentication_error", "request_too_large"]
    assert all(isinstance(body["error"], str) for body in bodies[2:4])
    assert [body["error"]["code"] for body in bodies[4:]] == ["invalid_api_key", "body_too_large"]


@defence("a quota is checked before the body is read", off=replacing(Account, "check", nothing))
def test_a_key_beyond_its_quota_is_refused_before_its_body_is_read(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        assert (await caller.complete(max_tokens=1)).status_code == 200
        wrong = await caller.complete(prompt={"any": "thing"})
        assert refused(wrong) == (429, None, "rate_limit_exceeded")

    served(tiny, scenario, quota=Quota(requests_per_minute=1))


@defence("invalid requests count in the quota", off=replacing(Account, "count_invalid", nothing))
def test_invalid_requests_count_in_the_quota(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> list[int]:
        answers = [await caller.complete(nothing=1), await caller.post("/tokenize", [])]
        return [answer.status_code for answer in [*answers, await caller.complete(max_tokens=1)]]

    assert served(tiny, scenario, quota=Quota(requests_per_minute=2)) == [400, 400, 429]


@defence(
    "long texts are tokenized only as far as they fit",
    off=replacing(PromptTokenizer, "_is_too_long", lambda *_: False),
)
def test_a_text_beyond_the_context_is_tokenized_in_part(tiny: Reference) -> None:
    """511 of 10,000 tokens fit, so only the first piece is tokenized."""

    async def scenario(_lab: Lab, caller: Caller) -> None:
        asked: list[int] = []
        tokenizer = caller.served.tokenizer
        encode = tokenizer.encode

        def counting(text: str, **options: Any) -> Any:
            asked.append(len(text))
            return encode(text, **options)

        tokenizer.encode = counting
        answer = await caller.complete("w5 " * 10_000)
        assert refused(answer) == (400, None, "context_length_exceeded")
        assert asked == [PIECE_CHARS]

    served(tiny, scenario)
