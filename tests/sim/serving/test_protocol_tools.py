"""Calls of tools in Anthropic's messages and OpenAI's responses."""

import json
from typing import Any

import pytest

from tests.support.models.letters import load_letters
from tests.support.swarm.gateway import Caller, served
from tests.support.swarm.swarm_lab import Lab, Reference

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
GREEDY = {"model": "model", "temperature": 0}
TOOL = {"name": "paint", "description": "Paint it."}
QUESTION = [{"role": "user", "content": "paint"}]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_letters(tmp_path_factory.mktemp("letters"))


def sent(text: str) -> list[dict[str, Any]]:
    lines = (line for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_messages_and_responses_call_a_tool_and_take_its_result(letters: Reference) -> None:
    messages: dict[str, Any] = {
        **GREEDY,
        "max_tokens": 200,
        "messages": QUESTION,
        "tools": [{**TOOL, "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
    }
    responses: dict[str, Any] = {
        **GREEDY,
        "max_output_tokens": 200,
        "input": QUESTION,
        "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "paint"},
        "parallel_tool_calls": False,
    }

    async def scenario(_lab: Lab, caller: Caller) -> None:
        whole = (await caller.post("/v1/messages", messages)).json()
        call = whole["content"][-1]
        assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "paint", "tool_use")
        assert call["input"] in ({"colour": "red"}, {"colour": "green"})
        events = sent((await caller.post("/v1/messages", {**messages, "stream": True})).text)
        parts = [each["delta"].get("partial_json", "") for each in events if "delta" in each]
        assert json.loads("".join(parts)) == call["input"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
        turns = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        after = await caller.post("/v1/messages", {**messages, "messages": turns, "max_tokens": 4})
        assert after.json()["usage"]["cache_read_input_tokens"] > 0

        answer = (await caller.post("/v1/responses", responses)).json()
        item = answer["output"][-1]
        assert (item["type"], item["name"]) == ("function_call", "paint")
        assert json.loads(item["arguments"]) == call["input"]
        events = sent((await caller.post("/v1/responses", {**responses, "stream": True})).text)
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        (done,) = [each for each in events if each["type"] == "response.function_call_arguments.done"]
        assert json.loads(done["arguments"]) == call["input"]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        more = {"input": [result], "previous_response_id": answer["id"], "max_output_tokens": 4}
        after = (await caller.post("/v1/responses", {**responses, **more})).json()
        assert after["usage"]["input_tokens"] > answer["usage"]["input_tokens"]

    served(letters, scenario)
