"""A gateway over whole nodes in virtual time: responses, refused requests, failures in the
swarm."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet.gateway import app as gateway_app
from swarmnet.gateway.app import FIRST_TOKEN_S
from swarmnet.gateway.generation import sequence_requests
from swarmnet.gateway.protocols.endpoint import KEEP_ALIVE_S
from swarmnet.resident import PATH
from swarmnet_client.batching.continuous_batching import BatchLimits
from swarmnet_client.chain import chain
from swarmnet_client.model.local_layers import LocalLayers
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.timing import Timing
from tests.defences import defence, replacing
from tests.support.attacks.lying_hosts import lying
from tests.support.swarm.gateway import (
    SPANS,
    Caller,
    chat_body,
    completion_body,
    continued,
    events_of,
    refused,
    served,
    words,
)
from tests.support.swarm.swarm_lab import Lab, Reference

PROMPT = [5, 6]
TOKENS = 8


def test_a_completion_is_the_models_greedy_output(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        return (await caller.complete(max_tokens=TOKENS)).json()

    answer = served(tiny, scenario)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": continued(tiny.greedy(PROMPT, TOKENS)),
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["total_tokens"] == 2 + TOKENS
    assert answer["precisions"] == ["f32"]
    assert answer["object"] == "text_completion"


def test_a_streamed_chat_equals_a_whole_one(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        whole = (await caller.chat(max_tokens=TOKENS, logprobs=True, top_logprobs=2)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await caller.chat(max_tokens=TOKENS, logprobs=True, top_logprobs=2, **options)
        return whole, events_of(streamed.text)

    whole, events = served(tiny, scenario)
    *chunks, usage = events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    (choice,) = whole["choices"]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    logprobs = [
        each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert logprobs == choice["logprobs"]["content"]
    assert len(logprobs) == TOKENS
    assert all(len(each["top_logprobs"]) == 2 for each in logprobs)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert [chunk.get("precisions") for chunk in chunks][-2:] == [None, ["f32"]]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == TOKENS
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_tells_the_route_and_times_of_each_trip(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True, "include_trace": True}}
        plain, traced = [
            events_of((await caller.chat(max_tokens=TOKENS, **each)).text)
            for each in ({"stream": True}, options)
        ]
        return plain, traced

    plain, traced = served(tiny, scenario)
    assert not any("swarmnet" in chunk for chunk in plain)
    told = [chunk["swarmnet"] for chunk in traced if "swarmnet" in chunk]
    assert sum(each.get("tokens", 0) for each in told) == TOKENS
    (route,) = [each["route"] for each in told if "route" in each]
    assert [(hop["start"], hop["end"]) for hop in route] == sorted(SPANS.values())
    steps = [step for each in told for step in each.get("steps", [])]
    assert sum(step["tokens"] for step in steps) == TOKENS
    assert sum(step["tokens"] > 0 for step in steps) == traced[-1]["usage"]["trips"]
    for step in steps:
        assert [hop["peer"] for hop in step["hops"]] == [hop["peer"] for hop in route]
        parts = [value for hop in step["hops"] for name, value in hop.items() if name.endswith("_s")]
        assert sum(parts) + step["here_s"] + step["back_s"] == pytest.approx(step["took_s"], abs=1e-4)


def test_an_answer_names_the_precisions_of_its_hosts(tiny: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> Any:
        await lab.start("b2", lying(lab.hosting(SPANS["b"]), precision="int4"))
        lab.network.crash(lab.peer_id("b"))
        await asyncio.sleep(Timing().refresh_s + 1)
        return (await caller.chat(max_tokens=2)).json()

    assert served(tiny, scenario)["precisions"] == ["f32", "int4"]


def test_concurrent_requests_do_not_change_each_others_output(tiny: Reference) -> None:
    prompts = [[2 + number, 3, 4 + 2 * number][: 1 + number % 3] for number in range(20)]

    async def scenario(_lab: Lab, caller: Caller) -> Any:
        asked = [caller.complete(prompt, max_tokens=3 + len(prompt)) for prompt in prompts]
        return [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*asked)]

    expected = [continued(tiny.greedy(prompt, 3 + len(prompt))) for prompt in prompts]
    assert served(tiny, scenario, limits=BatchLimits(active=8, waiting=20)) == expected


@defence(
    "the time of a first token does not tell that another user sent the same prompt",
    off=replacing(sequence_requests, "_owner", lambda *_: ""),
)
def test_prompts_are_reused_within_a_key_a_user_and_a_salt(tiny: Reference) -> None:
    prompt = " ".join(f"w{2 + number}" for number in range(40))
    owners = [{}, {"user": "one"}, {"cache_salt": "one"}]

    async def scenario(_lab: Lab, caller: Caller) -> list[bool]:
        cached = []
        for fields in [*owners, *owners]:
            body = completion_body(prompt, max_tokens=2, **fields)
            usage = (await caller.post("/v1/completions", body)).json()["usage"]
            reused = usage["prompt_tokens_details"]["cached_tokens"]
            assert reused in (0, usage["prompt_tokens"] - 1)
            cached.append(reused > 0)
        return cached

    assert served(tiny, scenario) == [False, False, False, True, True, True]


def test_choices_of_one_prompt_compute_it_once(tiny: Reference) -> None:
    prompt = " ".join(f"w{2 + number}" for number in range(40))

    async def scenario(_lab: Lab, caller: Caller) -> None:
        body = completion_body(prompt, max_tokens=2, n=4, temperature=1.0, seed=1)
        usage = (await caller.post("/v1/completions", body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * (usage["prompt_tokens"] - 1)

    served(tiny, scenario)


def test_choices_differ_and_repeat_with_their_seed(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        fields = {"max_tokens": TOKENS, "temperature": 1.5, "n": 3}
        answers = [await caller.complete(seed=seed, **fields) for seed in (1, 1, 50)]
        return [[choice["text"] for choice in answer.json()["choices"]] for answer in answers]

    first, again, other = served(tiny, scenario)
    assert first == again
    assert first != other
    assert len(set(first)) == 3


def test_several_prompts_are_answered_in_their_order(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        return (await caller.complete(["w5 w6", "w7"], max_tokens=4)).json()["choices"]

    choices = served(tiny, scenario)
    assert [choice["text"] for choice in choices] == [continued(tiny.greedy(ids, 4)) for ids in (PROMPT, [7])]


def test_a_stop_string_ends_a_choice_within_a_token(tiny: Reference) -> None:
    tokens = tiny.greedy(PROMPT, 20)
    text = continued(tokens)
    stop = words(tokens[4:7])[1:-1]  # begins and ends within a token
    expected = text[: text.index(stop)]

    async def scenario(lab: Lab, caller: Caller) -> Any:
        whole = (await caller.complete(max_tokens=20, stop=["never", stop])).json()
        streamed = await caller.complete(max_tokens=20, stop=stop, stream=True)
        await asyncio.sleep(1)
        assert caller.served.batcher.load.active == 0
        return whole, events_of(streamed.text)

    whole, events = served(tiny, scenario)
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] <= 8
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_logprobs_of_a_completion_are_its_text(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        options = {"max_tokens": TOKENS, "logprobs": 3}
        whole = (await caller.complete(**options)).json()["choices"][0]
        streamed = events_of((await caller.complete(stream=True, **options)).text)
        return whole, [event["choices"][0]["logprobs"] for event in streamed]

    whole, parts = served(tiny, scenario)
    found = whole["logprobs"]
    assert "".join(found["tokens"]) == whole["text"]
    assert all(
        whole["text"][at:].startswith(token)
        for at, token in zip(found["text_offset"], found["tokens"], strict=True)
    )
    assert [len(each) for each in found["top_logprobs"]] == [3] * TOKENS
    for name, values in found.items():
        assert values == [value for part in parts if part for value in part[name]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_head_is_an_error_that_says_so(
    tiny: Reference, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = LocalLayers.logits
    monkeypatch.setattr(LocalLayers, "logits", lambda *given: np.full_like(logits(*given), np.nan))

    async def scenario(_lab: Lab, caller: Caller) -> str:
        return (await caller.complete(max_tokens=2, logprobs=1, stream=stream)).text

    assert "scores of the model's tokens are not finite" in served(tiny, scenario)


def test_monitors_may_ask_with_head(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> list[tuple[int, bytes]]:
        answers = [await caller.http.head(path) for path in ("/health", "/v1/models", "/v1/completions")]
        return [answer.status_code for answer in answers]

    assert served(tiny, scenario) == [200, 200, 405]


def test_an_empty_prompt_is_refused_as_such(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        return refused(await caller.complete([], max_tokens=1)), refused(
            await caller.complete("", max_tokens=1)
        )

    assert served(tiny, scenario)[1] == (400, "prompt", "invalid_value")


def test_an_end_token_ends_a_choice(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        model = caller.served
        vocabulary = replace(model.vocabulary, end_ids=(tiny.greedy(PROMPT, 5)[4],))
        object.__setattr__(model, "vocabulary", vocabulary)
        return (await caller.complete(max_tokens=20, ignore_eos=False)).json()["choices"][0]

    choice = served(tiny, scenario)
    tokens = tiny.greedy(PROMPT, 5)
    assert choice["text"] == continued(tokens[: tokens.index(tokens[4])])
    assert choice["finish_reason"] == "stop"


def test_penalties_and_biases_follow_openais_formula(tiny: Reference) -> None:
    """Compared with the formula over all preceding tokens."""
    rules = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    usual = tiny.greedy(PROMPT, 1)[0]
    biases = {usual: -100.0, 11: 1.0}

    @torch.inference_mode()
    def greedy(count: int, change: Callable[[torch.Tensor, Counter[int]], None]) -> list[int]:
        ids = list(PROMPT)
        for _ in range(count):
            scores = tiny.model(torch.tensor([ids])).logits[0, -1]
            change(scores, Counter(ids[len(PROMPT) :]))
            ids.append(int(scores.argmax()))
        return ids[len(PROMPT) :]

    def penalised(scores: torch.Tensor, counts: Counter[int]) -> None:
        for token, count in counts.items():
            scores[token] -= 0.5 * count + 1.5

    def biased(scores: torch.Tensor, _counts: Counter[int]) -> None:
        for token, bias in biases.items():
            scores[token] += bias

    async def scenario(_lab: Lab, caller: Caller) -> Any:
        asked = ({}, rules, {"logit_bias": {str(token): bias for token, bias in biases.items()}})
        answers = [await caller.complete(max_tokens=20, **fields) for fields in asked]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    plain, *changed = served(tiny, scenario)
    assert changed == [continued(greedy(20, penalised)), continued(greedy(20, biased))]
    assert plain not in changed


BAD: list[tuple[dict[str, Any], tuple[int, str | None, str]]] = [
    ({"tfs_z": 0.5}, (400, "tfs_z", "unsupported_parameter")),
    ({"tools": [{"type": "function"}]}, (400, "tools", "missing_required_parameter")),
    ({"frequency_penalty": 2.1}, (400, "frequency_penalty", "invalid_value")),
    ({"presence_penalty": -2.1}, (400, "presence_penalty", "invalid_value")),
    ({"logit_bias": {"5": 101}}, (400, "logit_bias", "invalid_value")),
    ({"logit_bias": {"w5": 1}}, (400, "logit_bias", "invalid_value")),
    ({"logit_bias": {"-1": 1}}, (400, "logit_bias", "invalid_value")),
    ({"logit_bias": {"97": 1}}, (400, "logit_bias", "invalid_value")),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, (400, "logit_bias", "invalid_value")),
    ({"response_format": {"type": "xml"}}, (400, "response_format", "invalid_value")),
    ({"stream_options": {"x": 1}}, (400, "stream_options.x", "unsupported_parameter")),
    ({"temperature": 2.5}, (400, "temperature", "invalid_value")),
    ({"temperature": "hot"}, (400, "temperature", "invalid_value")),
    ({"top_p": 0}, (400, "top_p", "invalid_value")),
    ({"n": 17}, (400, "n", "invalid_value")),
    ({"max_tokens": 0}, (400, "max_tokens", "invalid_value")),
    ({"stop": ["a"] * 9}, (400, "stop", "invalid_value")),
    ({"stop": ""}, (400, "stop", "invalid_value")),
    ({"top_logprobs": 21}, (400, "top_logprobs", "invalid_value")),
    ({"messages": []}, (400, "messages", "invalid_value")),
    ({"messages": [{"role": "critic", "content": "x"}]}, (400, "messages", "invalid_value")),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        (400, "messages", "invalid_value"),
    ),
    ({"messages": [{"role": "user", "content": "w5 " * 600}]}, (400, "messages", "context_length_exceeded")),
    ({"messages": None}, (400, "messages", "missing_required_parameter")),
    ({"model": "gpt-4"}, (404, "model", "model_not_found")),
]


@pytest.fixture(scope="module")
def refusals(tiny: Reference) -> list[tuple[int, str | None, str]]:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        return [refused(await caller.post("/v1/chat/completions", chat_body() | fields)) for fields, _ in BAD]

    answers: list[tuple[int, str | None, str]] = served(tiny, scenario)
    return answers


@pytest.mark.parametrize("number", range(len(BAD)), ids=[json.dumps(fields)[:40] for fields, _ in BAD])
def test_an_invalid_request_names_its_error(refusals: list[Any], number: int) -> None:
    assert refusals[number] == BAD[number][1]


def test_parameters_that_change_nothing_are_accepted(tiny: Reference) -> None:
    nothing = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "user": "me",
        "tools": None,
    }
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "w5"}]},
        {"role": "user", "content": "w6"},
    ]

    async def scenario(_lab: Lab, caller: Caller) -> list[int]:
        answers = [
            await caller.chat(max_tokens=2, metadata={"a": "b"}, response_format={"type": "text"}, **nothing),
            await caller.chat(max_completion_tokens=2, messages=parts),
        ]
        return [answer.status_code for answer in answers]

    assert served(tiny, scenario) == [200, 200]


def test_invalid_requests_are_refused_with_the_codes_of_openai(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        http = caller.http
        nothing = await http.get("/v1/nothing")
        assert refused(nothing) == (404, None, "not_found")
        assert "/v1/chat/completions" in nothing.json()["error"]["message"]
        assert refused(await http.get("/v1/completions")) == (405, None, "method_not_allowed")
        assert refused(await http.get("/v1/models/another")) == (404, "model", "model_not_found")
        broken = await http.post("/v1/completions", content="{", headers={"content-type": "application/json"})
        assert refused(broken) == (400, None, "invalid_json")
        unnamed = await http.post("/v1/completions", content=json.dumps(completion_body()))
        assert refused(unnamed) == (400, None, "invalid_json")
        assert "content-type: application/json" in unnamed.json()["error"]["message"]
        assert refused(await caller.complete([])) == (400, "prompt", "invalid_value")
        assert refused(await caller.complete([97])) == (400, "prompt", "invalid_value")
        assert refused(await caller.complete(["w1"] * 9, n=2)) == (400, "n", "invalid_value")
        tokenizer = caller.served.tokenizer
        # The text is refused before it is tokenized.
        encode, tokenizer.encode = tokenizer.encode, None
        assert refused(await caller.complete("w5 " * 20_000)) == (400, None, "context_length_exceeded")
        tokenizer.encode = encode
        assert refused(await caller.complete([5] * 512)) == (400, "prompt", "context_length_exceeded")
        caller.served.tokenizer.chat_template = None
        assert refused(await caller.chat()) == (400, None, "no_chat_template")

    served(tiny, scenario)


def test_the_gateway_answers_for_models_tokenize_version_and_metrics(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        http = caller.http
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (await http.get(f"/v1/models/{model['id']}")).json() == model
        assert model["max_model_len"] == 512
        plain = await caller.post("/tokenize", {"prompt": "w5 w6"})
        assert plain.json() == {"count": 2, "max_model_len": 512, "tokens": [5, 6]}
        chat = await caller.post("/tokenize", {"messages": [{"role": "user", "content": "w5"}]})
        assert chat.json()["tokens"] == [3, 5, 9]
        assert refused(await caller.post("/tokenize", {})) == (400, "prompt", "invalid_value")
        other = await caller.post("/tokenize", {"prompt": "w5 w6", "model": "another"})
        assert refused(other) == (404, "model", "model_not_found")
        assert (await caller.post("/detokenize", {"tokens": [5, 6]})).json() == {"prompt": "w5 w6"}
        assert refused(await caller.post("/detokenize", {"tokens": [97]})) == (400, "tokens", "invalid_value")
        too_long = await caller.post("/detokenize", {"tokens": [5] * 513})
        assert refused(too_long) == (400, "tokens", "context_length_exceeded")
        assert "version" in (await http.get("/version")).json()
        assert (await http.get("/health")).status_code == 200
        await caller.complete(max_tokens=TOKENS)
        await caller.complete(nothing=1)
        metrics = (await http.get("/metrics")).text
        label = f'{{model_name="{model["id"]}"}}'
        for line in (
            f"vllm:generation_tokens_total{label} {TOKENS}.0",
            f"vllm:prompt_tokens_total{label} 2.0",
            f"vllm:time_to_first_token_seconds_count{label} 1.0",
            f"vllm:inter_token_latency_seconds_count{label} {TOKENS - 1}.0",
            f'vllm:request_success_total{{finished_reason="length",model_name="{model["id"]}"}} 1.0',
            f"vllm:num_requests_running{label} 0.0",
            f'swarmnet_gateway_refused_total{{code="unsupported_parameter",model_name="{model["id"]}"}} 1.0',
        ):
            assert line in metrics

    served(tiny, scenario)


@pytest.mark.parametrize("moment", [1, 4])
def test_a_node_failure_does_not_interrupt_a_stream(tiny: Reference, moment: int) -> None:
    async def scenario(lab: Lab, caller: Caller) -> Any:
        text, seen = "", 0
        body = completion_body(max_tokens=TOKENS, stream=True)
        async with caller.stream("/v1/completions", body) as stream:
            async for event in stream:
                seen += 1
                if seen == moment:
                    (group,) = caller.served.batcher._groups
                    lab.network.crash(group.report.route[1][0])
                if event.startswith("data: {"):
                    text += json.loads(event[6:])["choices"][0]["text"]
            return stream.status, text, caller.served.batcher.failovers

    spans = {**SPANS, "b2": (2, 4)}
    assert served(tiny, scenario, spans) == (200, continued(tiny.greedy(PROMPT, TOKENS)), 1)


def test_blocks_without_a_host_are_a_503(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        answer = await caller.complete(max_tokens=TOKENS)
        assert refused(answer) == (503, None, "no_route")
        assert "4:6" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert (await caller.http.get("/health")).json()["missing"] == {"model": [[4, 6]]}

    served(tiny, scenario, {"a": (0, 4)})


def test_this_users_commands_get_tokens_and_hosts(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        caller.gateway.own_key = "a secret of this user"
        body = {"messages": [{"role": "user", "content": "w5 w6"}], "max_new_tokens": TOKENS}
        body |= {"temperature": 0.0}
        for key in ("", "another", "a secret of this use"):
            refusal = await caller.http.post(PATH, json=body, headers={"authorization": f"Bearer {key}"})
            assert refusal.status_code == 404
        own = {"authorization": "Bearer a secret of this user"}
        answer = await caller.http.post(PATH, json=body, headers=own)
        *lines, end = [json.loads(line) for line in answer.text.splitlines()]
        usual = (await caller.chat(max_tokens=TOKENS)).json()
        assert (
            "".join(line["text"] for line in (*lines, end) if "text" in line)
            == (usual["choices"][0]["message"]["content"])
        )
        assert len([line for line in lines if "token" in line]) == TOKENS
        body = {"ids": PROMPT, "max_new_tokens": TOKENS, "temperature": 0.0}
        answer = await caller.http.post(PATH, json=body, headers=own)
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["token"] for line in lines if "token" in line] == tiny.greedy(PROMPT, TOKENS)
        rules = {"repetition_penalty": 1.8, "bad_words": [words(tiny.greedy(PROMPT, 1))]}
        answer = await caller.http.post(PATH, json=body | rules | {"biases": [[11, 3.0]]}, headers=own)
        rules["ignore_eos"] = False
        varied = await caller.complete(PROMPT, max_tokens=TOKENS, **rules, logit_bias={"11": 3.0})
        found = "".join(json.loads(line).get("text", "") for line in answer.text.splitlines())
        assert found.split() == varied.json()["choices"][0]["text"].split()
        assert found.split() != words(tiny.greedy(PROMPT, TOKENS)).split()
        beyond = await caller.http.post(PATH, json=body | {"ids": [1 << 20]}, headers=own)
        assert refused(beyond) == (400, "ids", "invalid_value")
        assert [hop[1:] for hop in end["report"]["route"]] == [[0, 2], [2, 4], [4, 6]]
        assert caller.gateway._running == 0

    served(tiny, scenario)


def test_an_own_answer_reports_no_faults_of_earlier_answers(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        caller.gateway.own_key = "secret"
        body = {"text": "w5 w6", "max_new_tokens": TOKENS, "temperature": 0.0}

        async def report() -> dict[str, Any]:
            answer = await caller.http.post(PATH, json=body, headers={"authorization": "Bearer secret"})
            found: dict[str, Any] = json.loads(answer.text.splitlines()[-1])["report"]
            return found

        await report()
        [group] = caller.served.batcher._groups
        group.report.wrong.append(PeerId("a host"))
        group.report.failovers, group.report.longest_stall_s = 3, 9.0
        after = await report()
        assert (after["wrong"], after["failovers"], after["longest_stall_s"]) == ([], 0, 0.0)
        assert len(after["route"]) == 3

    served(tiny, scenario)


def test_refusals_end_soon_after_a_host_has_returned(tiny: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> None:
        assert (await caller.http.get("/health")).status_code == 503
        await lab.start("b", lab.hosting((4, 6)))
        await asyncio.sleep(2.0)
        assert (await caller.http.get("/health")).status_code == 200
        answer = await caller.complete(max_tokens=TOKENS)
        assert answer.json()["choices"][0]["text"] == continued(tiny.greedy(PROMPT, TOKENS))

    served(tiny, scenario, {"a": (0, 4)})


def test_refusals_end_within_5_s_of_the_return_of_a_host(tiny: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> None:
        clock = asyncio.get_running_loop().time
        assert (await caller.complete(max_tokens=1)).status_code == 200
        await lab.stop("c")
        for _ in range(3):
            assert refused(await caller.complete(max_tokens=1)) == (503, None, "no_route")
        await lab.start("c", lab.hosting((4, 6)))
        returned = clock()
        for _ in range(50):
            if (await caller.complete(max_tokens=1)).status_code == 200:
                break
            await asyncio.sleep(0.1)
        assert clock() - returned < 5.0

    served(tiny, scenario)


def test_a_stream_says_how_far_a_long_prompt_is(tiny: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "FIRST_TOKEN_S", 0.0)
    monkeypatch.setattr(chain, "CHUNK", 8)
    step = chain.Chain._step

    async def slow(*given: Any) -> Any:
        """A step that takes long: the later its positions, the longer."""
        outputs = await step(*given)
        await asyncio.sleep(given[1][0].end / 8)
        return outputs

    monkeypatch.setattr(chain.Chain, "_step", slow)

    async def scenario(_lab: Lab, caller: Caller) -> list[str]:
        body = completion_body([5] * 32, max_tokens=1, stream=True)
        async with caller.stream("/v1/completions", body) as stream:
            return [event async for event in stream]

    events = served(tiny, scenario)
    assert events[:3] == [f": prefill {done}/32" for done in (8, 16, 24)]
    assert events[3].startswith("data: ")


def test_a_waiting_stream_sends_comments_and_a_late_failure_an_event(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        async with caller.stream("/v1/chat/completions", chat_body(max_tokens=TOKENS, stream=True)) as stream:
            events = [event async for event in stream]
        return stream.status, events

    timing = Timing(recover_s=FIRST_TOKEN_S + 1.5 * KEEP_ALIVE_S)
    status, events = served(tiny, scenario, {"a": (0, 4)}, timing=timing)
    assert status == 200
    assert events[0] == ": keep-alive"
    assert len(events) == 3
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "no_route"
    assert events[-1] == "data: [DONE]"


def test_a_draining_gateway_finishes_requests_and_refuses_new_ones(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        running = asyncio.create_task(caller.complete(max_tokens=TOKENS))
        await asyncio.sleep(0.1)
        assert caller.served.batcher.load.active == 1
        draining = asyncio.create_task(caller.gateway.drain())
        await asyncio.sleep(0)
        assert refused(await caller.complete(max_tokens=1)) == (503, None, "stopping")
        assert (await caller.http.get("/health")).status_code == 503
        assert not draining.done()
        assert (await running).json()["choices"][0]["text"] == continued(tiny.greedy(PROMPT, TOKENS))
        await draining

    served(tiny, scenario)
