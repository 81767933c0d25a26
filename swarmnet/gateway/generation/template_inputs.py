"""Chats as chat templates read them: messages, tools and further variables.

A template that knows no tools gets them in the system message, and calls and results as text.
"""

import json
from collections.abc import Mapping
from typing import Any

from swarmnet.gateway.generation.requests import ChatMessage, ChatPrompt, Tool
from swarmnet.gateway.generation.tool_formats import HERMES, AnswerForm, instruction


def template_messages(chat: ChatPrompt, form: AnswerForm) -> list[dict[str, Any]]:
    """Return the messages of a chat for a model that writes in ``form``."""
    if form.knows_tools:
        return [_native(message) for message in chat.messages]
    messages = [_plain(message) for message in chat.messages]
    if not chat.tools or chat.choice.mode == "none":
        return messages
    told = instruction("\n".join(json.dumps(_function(tool)["function"]) for tool in chat.tools))
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def template_tools(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """Return the tools that the template shows."""
    if chat.choice.mode == "none":
        return None
    return [_function(tool) for tool in chat.tools] or None


def template_variables(chat: ChatPrompt) -> dict[str, Any]:
    """Return what templates read about thinking, and what the caller gives them."""
    effort = chat.reasoning.effort
    thinking: Mapping[str, Any] = {}
    if effort == "none":
        thinking = {"enable_thinking": False, "thinking": False}
    elif effort:
        thinking = {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}
    return {**thinking, **chat.template}


def _function(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": fields}


def _native(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        found["reasoning_content"] = found["thinking"] = message.reasoning
    if message.name:
        found["name"] = message.name
    if message.call_id:
        found["tool_call_id"] = message.call_id
    if message.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.values()},
            }
            for call in message.calls
        ]
    return found


def _plain(message: ChatMessage) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "user", "content": f"Result of {message.name or message.call_id}:\n{message.text}"}
    calls = "".join("\n" + HERMES.written(call.name, call.arguments) for call in message.calls)
    return {"role": message.role, "content": (message.text + calls).strip() if calls else message.text}
