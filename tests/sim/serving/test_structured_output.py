"""Answers that obey a grammar: formats, tools and thoughts, through a gateway over whole nodes."""

import asyncio
import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import openai
import pytest

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.models import resolve
from tests.support.models.letters import load_letters
from tests.support.network.memory_network import LinkProfile
from tests.support.swarm.gateway import SPANS, TEMPLATE, Caller, chat_body, events_of, served
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


@dataclass(frozen=True)
class Asked:
    """A random request. ``check`` raises for a complete answer that does not do what it must."""

    fields: dict[str, Any]
    check: Callable[["Said"], None]


@dataclass
class Said:
    """A message: its text, and the names and arguments of its calls."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    reason: str = ""

    @classmethod
    def whole(cls, choice: dict[str, Any]) -> "Said":
        message = choice["message"]
        calls = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls") or ()
        ]
        return cls(message["content"] or "", calls, choice["finish_reason"])

    @classmethod
    def streamed(cls, events: list[dict[str, Any]]) -> "Said":
        said = cls()
        for choice in (choice for event in events for choice in event["choices"]):
            said.reason = choice["finish_reason"] or said.reason
            said.text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part["index"] == len(said.calls):
                    said.calls.append([part["function"]["name"], ""])
                said.calls[part["index"]][1] += part["function"].get("arguments", "")
        return said


def random_format(seed: int) -> Asked:
    schema = {"type": "object", "properties": {"a": random_schema(random.Random(seed))}, "required": ["a"]}
    schema["additionalProperties"] = False
    return Asked(
        {"response_format": format_of(schema)},
        lambda said: jsonschema.validate(json.loads(said.text), schema),
    )


def random_tools(seed: int) -> Asked:
    """Tools with random names and nested arguments, which may, must or must not be called."""
    chance = random.Random(seed)
    letters = string.ascii_letters + string.digits + "_-."
    names = {
        "".join(chance.choices(letters, k=chance.choice([1, 5, 64]))) for _ in range(chance.randrange(1, 6))
    }
    schemas = {}
    for name in sorted(names):
        arguments = chance.sample(
            ["name", "size", "kind of it", "tags", "\u00fcber", "x"], chance.randrange(5)
        )
        schemas[name] = {
            "type": "object",
            "properties": {each: random_schema(chance, 1) for each in arguments},
            "required": [each for each in arguments if chance.random() < 0.7],
            "additionalProperties": False,
        }
    named, is_parallel = chance.choice([*schemas]), chance.random() < 0.5
    choice = chance.choice(["auto", "required", {"type": "function", "function": {"name": named}}])
    fields = {
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ],
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
    }

    def check(said: Said) -> None:
        assert is_parallel or len(said.calls) <= 1
        assert choice == "auto" or said.calls
        for name, arguments in said.calls:
            assert choice in ("auto", "required") or name == named
            jsonschema.validate(json.loads(arguments), schemas[name])
        assert (said.reason == "tool_calls") == bool(said.calls)

    return Asked(fields, check)


async def answers(lab: Lab, caller: Caller, asked: Mapping[int, Asked]) -> int:
    """Ask each question greedy and sampled, whole and streamed. Return how many complete answers
    were checked.

    While answers stream, a host of their chain is killed again and again, and comes back.
    """
    places = asyncio.Semaphore(8)
    checked = 0

    async def one(seed: int, temperature: float, *, stream: bool) -> Said:
        fields = {"max_tokens": 400, "temperature": temperature, "seed": seed, "ignore_eos": False}
        fields["thinking_budget"] = 32  # random letters do not end their thoughts
        async with places:
            answer = await caller.chat(stream=stream, **fields, **asked[seed].fields)
        assert answer.status_code == 200, (seed, answer.text)
        return Said.streamed(events_of(answer.text)) if stream else Said.whole(answer.json()["choices"][0])

    async def kill() -> None:
        names = {lab.peer_id(name): name for name in ("b", "b2")}
        while True:
            await asyncio.sleep(0.3)
            for group in caller.served.batcher._groups:
                name = names[group.report.route[1][0]]
            await lab.stop(name)
            await asyncio.sleep(0.3)
            await lab.start(name, lab.hosting(SPANS["b"]))

    turns = [(seed, temperature) for seed in asked for temperature in (0.0, 1.2)]
    found = await asyncio.gather(*(one(*turn, stream=False) for turn in turns))
    async with in_background(kill()):
        streamed = await asyncio.gather(*(one(*turn, stream=True) for turn in turns))
    for turn, whole, again in zip(turns, found, streamed, strict=True):
        assert whole == again, turn
        if whole.reason != "length":
            try:
                asked[turn[0]].check(whole)
            except Exception as error:
                error.add_note(f"seed and temperature {turn}: {whole}")
                raise
            checked += 1
    return checked


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 500), marks=pytest.mark.thorough)])
def test_answers_to_random_schemas_are_valid(letters: Reference, seeds: range) -> None:
    async def scenario(lab: Lab, caller: Caller) -> int:
        checked = await answers(lab, caller, {seed: random_format(seed) for seed in seeds})
        assert caller.served.batcher.failovers
        return checked

    assert served(letters, scenario, {**SPANS, "b2": SPANS["b"]}, limit_s=1e5) > 1.5 * len(seeds)


FAMILIES = {
    "Hermes": "",
    "Qwen-Coder": "tools <tool_call> <function= <parameter=",
    "GLM": "tools <tool_call> <arg_key>",
    "Llama": 'tools <|python_tag|> "parameters": ',
    "calls in Python": "tools [func_name1(",
    "Mistral": "tools [TOOL_CALLS]",
    "Mistral with arguments": "tools [TOOL_CALLS] [ARGS]",
    "DeepSeek": "tools <\uff5ctool\u2581calls\u2581begin\uff5c>",
    "DeepSeek with fences": "tools <\uff5ctool\u2581calls\u2581begin\uff5c> ```json",
    "Harmony": "tools <|channel|> <|message|>",
}
"""Texts in a chat template that show how a family of models writes calls."""


@pytest.mark.parametrize(
    "families",
    [
        ("Hermes", "GLM", "calls in Python"),
        *(pytest.param([name], marks=pytest.mark.thorough) for name in FAMILIES),
    ],
)
def test_calls_of_random_tools_are_valid(letters: Reference, families: Sequence[str]) -> None:
    count = 20 if len(families) == 1 else 1

    async def scenario(lab: Lab, caller: Caller) -> int:
        checked = 0
        for name in families:
            number, marks = [*FAMILIES].index(name), FAMILIES[name]
            caller.served.tokenizer.chat_template = TEMPLATE + "{# " + marks + " #}"
            seeds = range(number * count, (number + 1) * count)
            checked += await answers(lab, caller, {seed: random_tools(seed) for seed in seeds})
        assert caller.served.batcher.failovers
        return checked

    assert served(letters, scenario, {**SPANS, "b2": SPANS["b"]}, limit_s=1e5) > len(families) * count


def test_a_schema_holds_while_a_host_is_killed(letters: Reference) -> None:
    async def scenario(lab: Lab, caller: Caller) -> list[str]:
        fields = {"max_tokens": 400, "response_format": format_of(SCHEMA), "ignore_eos": False}
        plain = (await caller.chat(**fields)).json()["choices"][0]["message"]["content"]
        text, seen = "", 0
        async with caller.stream("/v1/chat/completions", chat_body(stream=True, **fields)) as stream:
            async for event in stream:
                seen += 1
                if seen == 4:
                    (group,) = caller.served.batcher._groups
                    lab.network.crash(group.report.route[1][0])
                if event.startswith("data: {"):
                    text += json.loads(event[6:])["choices"][0]["delta"].get("content", "")
        assert caller.served.batcher.failovers == 1
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


PEOPLE = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "first_name": {"type": "string", "maxLength": 12},
                    "profession": {"type": "string", "maxLength": 16},
                    "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
                    "is_alive": {"type": "boolean"},
                },
                "required": ["first_name", "profession", "year_of_birth", "is_alive"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}
QUESTIONS = (
    "Name two scientists as JSON.",
    "Invent two people as JSON.",
    "Name two composers as JSON.",
    "Name two painters of the nineteenth century as JSON.",
    "List two famous explorers as JSON.",
    "Describe two astronauts as JSON.",
    "Name two authors of novels as JSON.",
    "Invent two employees of a bakery as JSON.",
    "Name two presidents as JSON.",
    "List two mathematicians as JSON.",
)
FAR = LinkProfile(delay_s=0.05)
"""Half of a round trip of 100 ms."""


@pytest.mark.thorough
def test_json_takes_few_trips_over_far_links() -> None:
    """With the real model. Free text has drafts, too: longer ones the farther the hosts are."""

    async def scenario(_lab: Lab, caller: Caller) -> None:
        name = caller.gateway.models.usual_name
        trips, tokens = 0, 0
        for question in QUESTIONS:
            asked = {"model": name, "max_tokens": 120, "ignore_eos": False, "temperature": 0}
            formed = await caller.chat(question, **asked, response_format=format_of(PEOPLE))
            jsonschema.validate(json.loads(formed.json()["choices"][0]["message"]["content"]), PEOPLE)
            used = formed.json()["usage"]
            asked |= {"max_tokens": used["completion_tokens"], "ignore_eos": True}
            free = (await caller.chat(question.replace(" as JSON", ""), **asked)).json()["usage"]
            assert free["completion_tokens"] == used["completion_tokens"]
            trips, tokens = trips + used["trips"], tokens + free["trips"]
        print(f"trips of JSON: {trips / tokens:.2f} of those of free text")
        assert trips <= 0.6 * tokens

    model = Reference(resolve("smollm2-135m-instruct", cache_dir=default_cache_dir()))
    spans = {"a": (0, 10), "b": (10, 20), "c": (20, 30)}
    served(model, scenario, spans, link=FAR, limit_s=1e4)
