"""Answers that obey a grammar: formats, tools and thoughts, through a gateway over whole nodes."""

import asyncio
import json
import random
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.models.letters import load_letters
from tests.support.swarm.gateway import SPANS, Caller, chat_body, events_of, served
from tests.support.swarm.swarm_lab import Lab, Reference

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_letters(tmp_path_factory.mktemp("letters"))


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_a_schema_holds_greedy_and_sampled_whole_and_streamed(letters: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        found = []
        for temperature in (0, 1.5):
            fields = {"max_tokens": 400, "temperature": temperature, "seed": 3}
            fields |= {"response_format": format_of(SCHEMA), "ignore_eos": False}
            whole = (await caller.chat(**fields)).json()
            streamed = events_of((await caller.chat(stream=True, **fields)).text)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed)
            found.append((whole["choices"][0], text, whole["usage"]))
        return found

    for choice, streamed, usage in served(letters, scenario):
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["message"]["content"] == streamed
        assert choice["finish_reason"] == "stop"
        assert usage["trips"] < usage["completion_tokens"]


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of objects, lists, unions, numbers with bounds, patterns and choices."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern"]
    kind = chance.choice(kinds + ["object", "array", "anyOf"] * (3 - depth))
    low = chance.randrange(-50, 50)
    match kind:
        case "string":
            return {"type": "string", "minLength": chance.randrange(3), "maxLength": chance.randrange(3, 9)}
        case "integer" | "number":
            return {"type": kind, "minimum": low, "maximum": low + chance.randrange(1, 2000)}
        case "enum":
            return {"enum": chance.sample(["red", "green", 'a "quoted" one', 7, -1.5, None, True], 3)}
        case "pattern":
            return {
                "type": "string",
                "pattern": chance.choice(["^[a-f]{2,5}$", r"^\d{3}-\d{2}$", "^(ab|cd)+x$"]),
            }
        case "object":
            names = chance.sample(
                ["name", "size", "kind of it", "tags", "\u00fcber", "x"], chance.randrange(1, 4)
            )
            inner = {name: random_schema(chance, depth + 1) for name in names}
            needed = [name for name in names if chance.random() < 0.7]
            return {"type": "object", "properties": inner, "required": needed, "additionalProperties": False}
        case "array":
            items = random_schema(chance, depth + 1)
            return {"type": "array", "items": items, "minItems": chance.randrange(2), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}
    return {"type": kind}


async def checked(caller: Caller, seed: int) -> int:
    """Ask for random schemas in four ways, and return how many whole answers were valid."""
    schema = {"type": "object", "properties": {"a": random_schema(random.Random(seed))}, "required": ["a"]}
    schema["additionalProperties"] = False
    valid = 0
    for temperature in (0.0, 1.2):
        fields = {"max_tokens": 600, "temperature": temperature, "seed": seed, "ignore_eos": False}
        fields["response_format"] = format_of(schema)
        answer = await caller.chat(**fields)
        assert answer.status_code == 200, (seed, answer.text)
        choice = answer.json()["choices"][0]
        streamed = events_of((await caller.chat(stream=True, **fields)).text)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed)
        assert text == choice["message"]["content"], seed
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(text), schema)
            valid += 2
    return valid


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 500), marks=pytest.mark.thorough)])
def test_answers_to_random_schemas_are_valid(letters: Reference, seeds: range) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> int:
        places = asyncio.Semaphore(8)

        async def one(seed: int) -> int:
            async with places:
                return await checked(caller, seed)

        return sum(await asyncio.gather(*map(one, seeds)))

    assert served(letters, scenario) > 3 * len(seeds)


def test_a_schema_holds_while_a_host_is_killed(letters: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> list[str]:
        fields = {"max_tokens": 400, "response_format": format_of(SCHEMA), "ignore_eos": False}
        plain = (await caller.chat(**fields)).json()["choices"][0]["message"]["content"]
        text, seen = "", 0
        async with caller.stream("/v1/chat/completions", chat_body(stream=True, **fields)) as stream:
            async for event in stream:
                seen += 1
                if seen == 4:
                    (group,) = caller.gateway.served.batcher._groups
                    lab.network.crash(group.report.route[1][0])
                if event.startswith("data: {"):
                    text += json.loads(event[6:])["choices"][0]["delta"].get("content", "")
        assert caller.gateway.served.batcher.failovers == 1
        return [plain, text]

    plain, interrupted = served(letters, scenario, {**SPANS, "b2": (2, 4)})
    assert interrupted == plain
    jsonschema.validate(json.loads(plain), SCHEMA)


def test_scores_of_forced_tokens_are_computed(letters: Reference) -> None:
    """So a request for them gets the same answer in more trips."""

    async def scenario(_lab: Lab, caller: Caller) -> list[Any]:
        fields = {"max_tokens": 400, "response_format": format_of(SCHEMA), "ignore_eos": False}
        return [(await caller.chat(**fields, logprobs=scored)).json() for scored in (False, True)]

    plain, scored = served(letters, scenario)
    assert scored["choices"][0]["message"] == plain["choices"][0]["message"]
    assert len(scored["choices"][0]["logprobs"]["content"]) == scored["usage"]["completion_tokens"]
    assert plain["usage"]["trips"] < scored["usage"]["trips"]


def test_openais_client_gets_calls_and_parsed_answers(letters: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://127.0.0.1/v1", http_client=caller.http, max_retries=0
        )
        function = {"name": "tell", "description": "Tell it.", "parameters": SCHEMA}
        asked: dict[str, Any] = {
            "model": "model",
            "messages": [{"role": "user", "content": "w5"}],
            "tools": [{"type": "function", "function": function}],
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 400,
        }
        for choice in ("required", {"type": "function", "function": {"name": "tell"}}):
            answer = await client.chat.completions.create(tool_choice=choice, **asked)
            (call,) = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == "tool_calls"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        arguments = ""
        async for chunk in await client.chat.completions.create(tool_choice="required", stream=True, **asked):
            for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                arguments += (delta.function and delta.function.arguments) or ""
        assert arguments == call.function.arguments
        turn = [
            *asked["messages"],
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "w7"},
        ]
        after = await client.chat.completions.create(**{**asked, "messages": turn, "tool_choice": "none"})
        assert after.choices[0].message.tool_calls is None
        for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
            answer = await client.chat.completions.create(
                model="model", messages=asked["messages"], max_tokens=20, extra_body=extra
            )
            assert answer.choices[0].message.content in {"yes", "no"}

    served(letters, scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"response_format": format_of({"type": "string", "pattern": "("})},
        {"guided_grammar": "start: %json {}"},
        {"guided_regex": "a", "guided_choice": ["a"]},
    ],
    ids=str,
)
def test_a_form_that_no_grammar_has_is_refused(letters: Reference, fields: dict[str, Any]) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> Any:
        return (await caller.chat(**fields)).status_code

    assert served(letters, scenario) == 400
