"""Answers that obey a grammar: formats, tools and thoughts, through a gateway over whole nodes."""

import json
from typing import Any

import jsonschema
import pytest

from tests.support.models.letters import load_letters
from tests.support.swarm.gateway import Caller, events_of, served
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
