"""Answers through an endpoint that runs on this machine (``swarmnet/resident.py``)."""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swarmnet.cli.chat.generation import Pieces, RunAnswer, SamplingOptions, Screen, Stopped
from swarmnet.resident import PATH, Resident
from swarmnet_protocols.errors import SwarmnetError

if TYPE_CHECKING:
    from swarmnet_protocols.models.text.vocabulary import Vocabulary

CONNECT_S = 5.0
"""Seconds in which the endpoint has to begin its response. It does so before it computes."""
MAX_LINE_BYTES = 1 << 20


def ask(
    resident: Resident, prompt: Mapping[str, Any], sampling: SamplingOptions, screen: Screen
) -> RunAnswer | None:
    """Return the answer to ``prompt``, a ``text`` or ``messages``; ``screen`` shows it piece by
    piece. None if the endpoint does not take the prompt, or fails before the first token.

    Raises ``Stopped`` for Ctrl-C, and ``SwarmnetError`` for a later failure.
    """
    total, report = 0, {}
    with ExitStack() as waiting:
        prefilled = waiting.enter_context(screen.prefill())
        pieces = Pieces(screen.show, waiting.close)
        try:
            for line in _lines(resident, prompt, sampling):
                if "done" in line:
                    total = int(line["total"])
                    prefilled(int(line["done"]), total)
                    continue
                if "token" in line:
                    pieces.token(int(line["token"]))
                pieces.text(str(line["text"]))
                if "report" in line:
                    total, report = int(line["prompt_tokens"]), line["report"]
        except KeyboardInterrupt:
            raise Stopped(pieces.answer(total, {})) from None
        except SwarmnetError:
            if pieces.token_ids:
                raise
            return None
    return pieces.answer(total, report)


class EndpointAnswerer:
    """Answers the prompts of a chat. The endpoint is the client of the swarm, and keeps the KV
    caches; only the tokenizer is here."""

    def __init__(self, resident: Resident, vocabulary: "Vocabulary", context: int) -> None:
        from swarmnet_client.chain.hops import ChainReport

        self.tokenizer = vocabulary.tokenizer
        self.context = context
        self.vocabulary_size = vocabulary.size
        self.report = ChainReport()
        self.traffic = None
        self._resident = resident

    def session(self) -> AbstractContextManager[object]:
        return nullcontext()

    def answer(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        put: Callable[[int], None],
        *,
        exact: bool = False,
        prefilled: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        if exact:
            raise ValueError("an endpoint ends answers where the model does")
        for line in _lines(self._resident, {"ids": list(ids)}, sampling):
            if "done" in line:
                prefilled(int(line["done"]), int(line["total"]))
            elif "token" in line:
                put(int(line["token"]))
            else:
                known = vars(self.report)
                known |= {name: value for name, value in line["report"].items() if name in known}


def _lines(
    resident: Resident, prompt: Mapping[str, Any], sampling: SamplingOptions
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a response (``gateway/own_answers.py``). Raises ``SwarmnetError`` if the
    last one does not come."""
    usual = vars(SamplingOptions())
    fields = {name: value for name, value in vars(sampling).items() if value != usual[name]}
    if fields.pop("logit_bias", ()):
        fields["biases"] = sampling.biases
    always = {"max_new_tokens": sampling.max_new_tokens, "speculate": sampling.speculate}
    given = {**prompt, **fields, **always}
    headers = {"authorization": f"Bearer {resident.key}", "content-type": "application/json"}
    url = urlsplit(resident.url)
    try:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=CONNECT_S)
        with closing(connection):
            connection.request("POST", PATH, json.dumps(given), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise SwarmnetError(f"the endpoint on this machine refuses: {_refusal(response)}")
            if connection.sock is not None:
                connection.sock.settimeout(None)
            while text := response.readline(MAX_LINE_BYTES):
                line = json.loads(text)
                if "error" in line:
                    raise SwarmnetError(str(line["error"]), hint=str(line.get("hint", "")))
                yield line
                if "report" in line:
                    return
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise _ended() from error
    raise _ended()


def _ended() -> SwarmnetError:
    return SwarmnetError(
        "the endpoint on this machine ended", hint="start the command again: it joins the swarm itself then"
    )


def _refusal(response: http.client.HTTPResponse) -> str:
    return str(json.loads(response.read(MAX_LINE_BYTES))["error"]["message"])
