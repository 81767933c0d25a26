"""An endpoint that answers agents by a script: it calls one tool, then says a sentence.

Its answers have the gateway's own form. It keeps each conversation that it continued, as a row of
training data for ``swarmnet tune``.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from swarmnet.gateway.generation.events import (
    ArgumentsDelta,
    ChoiceEnd,
    Delta,
    TextDelta,
    ToolCallBegin,
    Usage,
    whole_choices,
)
from swarmnet.gateway.generation.requests import ChatMessage, ChatPrompt, ToolCall
from swarmnet.gateway.generation.template_inputs import template_messages
from swarmnet.gateway.generation.tool_formats import form_of
from swarmnet.gateway.protocols.chat_completions import CHAT_COMPLETIONS
from swarmnet.gateway.protocols.endpoint import ServedAs
from swarmnet.gateway.protocols.kept_responses import KeptResponses
from swarmnet.gateway.protocols.messages import MESSAGES
from swarmnet.gateway.protocols.responses import RESPONSES
from swarmnet_client.model.sampling import Sampling

CALLS: Mapping[str, Mapping[str, Any]] = {
    "Glob": {"pattern": "*"},
    "bash": {"command": "ls"},
    "exec_command": {"cmd": "ls"},
    "shell_command": {"command": "ls"},
    "shell": {"command": ["ls"]},
}
"""Tools of agents that list files → the arguments of the call. The first known tool is called."""
TEXT = "These are the files of the folder."
ENDPOINTS: Mapping[str, Any] = {each.path: each for each in (CHAT_COMPLETIONS, MESSAGES, RESPONSES)}


@dataclass
class Script:
    """The requests that an endpoint got. ``tokenizer``: that of the model that learns them."""

    model: str
    context: int
    tokenizer: Any
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Paths and bodies of the requests for answers."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Conversations with tools, each with its answer."""

    def answer(self, chat: ChatPrompt) -> ChatMessage:
        """Return the answer to a chat, and keep both if the chat has tools."""
        known = {tool.name for tool in chat.tools}
        name = next((name for name in CALLS if name in known), "")
        if name and chat.messages[-1].role != "tool":
            said = ChatMessage("assistant", calls=(ToolCall("call_1", name, json.dumps(CALLS[name])),))
        else:
            said = ChatMessage("assistant", TEXT)
        if name:
            whole = replace(chat, messages=(*chat.messages, said))
            form = form_of(self.tokenizer.chat_template)
            self.rows.append({"messages": template_messages(whole, form)})
        return said


def events_of(said: ChatMessage) -> Iterator[Delta]:
    """Yield an answer as the core's events."""
    if said.text:
        yield TextDelta(0, said.text)
    for number, call in enumerate(said.calls):
        yield ToolCallBegin(0, number, call.id, call.name)
        yield ArgumentsDelta(0, number, call.arguments)
    yield ChoiceEnd(0, "tool_calls" if said.calls else "stop")


@contextmanager
def playing(script: Script) -> Iterator[str]:
    """Yield the URL of an endpoint that plays ``script``."""
    kept = KeptResponses(lambda: 0.0)

    class Player(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            about = {"id": script.model, "max_model_len": script.context, "available": True}
            self._send("application/json", json.dumps({"object": "list", "data": [about]}).encode())

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            path = self.path.partition("?")[0]
            if path not in ENDPOINTS:
                self._send("application/json", b'{"input_tokens": 1}')
                return
            script.bodies.append((path, fields))
            endpoint = ENDPOINTS[path]
            body = endpoint.body.model_validate(fields)
            if endpoint is RESPONSES:
                body.continue_from(kept)
            said = script.answer(endpoint.request(body, Sampling()).prompt)
            writer = endpoint.writer(body, ServedAs(script.model, script.tokenizer, 0, "", kept))
            events, usage = [*events_of(said)], Usage(1, 1)
            if not body.stream:
                whole = writer.whole(whole_choices(events), usage)
                self._send("application/json", json.dumps(whole).encode())
                return
            parts = [*writer.begin(usage), *(part for each in events for part in writer.event(each, usage))]
            self._send("text/event-stream", b"".join([*parts, *writer.end(usage)]))

        def _send(self, kind: str, content: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Player) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
