"""Calls of tools in Anthropic's messages and OpenAI's responses, and the requests of Open WebUI."""

import json
from datetime import datetime
from typing import Any

import pytest
from pydantic import TypeAdapter

from swarmnet.gateway.protocols.schemas import AgentTools
from tests.support.models.letters import load_letters
from tests.support.swarm.gateway import Caller, events_of, served
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


def test_tools_of_servers_and_of_free_text_are_left_out() -> None:
    tools = [
        {"name": "anthropic", "input_schema": SCHEMA},
        {"type": "custom", "name": "also anthropic", "input_schema": SCHEMA},
        {"type": "function", "name": "openai", "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    found: list[Any] = TypeAdapter(AgentTools).validate_python(tools)
    assert [each.name for each in found] == ["anthropic", "also anthropic", "openai"]


FUNCTION = {"type": "function", "function": {**TOOL, "parameters": SCHEMA}}
WEB_UI = {"content-type": "application/json", "authorization": "Bearer "}


def test_open_webui_lists_and_chats_as_with_openai(letters: Reference) -> None:
    """Its requests are those of its `routers/openai.py` and `utils/payload.py`, with what these
    read of the answers."""
    called = {"index": 0, "id": "call_1", "type": "function"}
    called["function"] = {"name": "paint", "arguments": '{"colour": "red"}'}
    turns = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "paint"}]},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    options = {"temperature": 0.0, "top_p": 0.9, "max_tokens": 20, "seed": 1, "logit_bias": {"5": 1}}

    async def scenario(_lab: Lab, caller: Caller) -> None:
        (listed,) = (await caller.http.get("/v1/models", headers=WEB_UI)).json()["data"]
        model = {**listed, "name": listed.get("name", listed["id"])}
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "tools": [FUNCTION]}
        for messages in (turns[:2], turns):
            body = {"model": model["id"], "messages": messages, **streamed, **options}
            answer = await caller.http.post("/v1/chat/completions", json=body, headers=WEB_UI)
            assert "text/event-stream" in answer.headers["content-type"]
            events = events_of(answer.text)
            assert all("delta" in choice for event in events for choice in event["choices"])
            assert events[-1]["usage"]["completion_tokens"] <= 20
        title = {"model": model["id"], "messages": turns[:1], "stream": False, "max_completion_tokens": 20}
        whole = (await caller.http.post("/v1/chat/completions", json=title, headers=WEB_UI)).json()
        assert isinstance(whole["choices"][0]["message"]["content"], str)  # a random model may say nothing

    served(letters, scenario)


def test_open_webui_lists_and_chats_as_with_ollama(letters: Reference) -> None:
    """Its requests are those of its `routers/ollama.py` and `utils/payload.py`, which find a model
    only by a name with a tag."""
    called = {"index": 0, "id": "call_1", "function": {"name": "paint", "arguments": {"colour": "red"}}}
    turns = [
        {"role": "user", "content": "paint"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]

    async def scenario(_lab: Lab, caller: Caller) -> None:
        version = (await caller.http.get("/api/version", headers=WEB_UI)).json()["version"]
        assert [*map(int, version.split("."))]
        known = {}
        for path in ("/api/tags", "/api/ps"):
            (known[path],) = (await caller.http.get(path, headers=WEB_UI)).json()["models"]
        model = known["/api/tags"]
        assert known["/api/ps"]["name"] == model["name"]
        assert int(datetime.fromisoformat(known["/api/ps"]["expires_at"]).timestamp())
        chosen = model["model"] if ":" in model["model"] else f"{model['model']}:latest"
        assert chosen == model["model"]
        for messages in (turns[:1], turns):
            body: dict[str, Any] = {
                "model": chosen,
                "messages": messages,
                "stream": True,
                "tools": [FUNCTION],
            }
            body |= {"options": {"temperature": 0.0, "num_predict": 20, "num_ctx": 4096}, "think": False}
            answer = await caller.http.post("/api/chat", json=body, headers=WEB_UI)
            *parts, last = map(json.loads, answer.text.splitlines())
            assert all("content" in part["message"] and not part["done"] for part in parts)
            assert last["done"]
            assert last["eval_count"] <= 20
            assert last["eval_duration"] >= 0

    served(letters, scenario)
