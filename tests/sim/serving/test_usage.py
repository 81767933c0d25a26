"""Usage of the keys of a gateway, and requests that their keys cancel."""

import asyncio
from typing import Any

from swarmnet.gateway.accounts import KeyAccounts
from tests.defences import defence, replacing
from tests.support.swarm.gateway import Caller, completion_body, refused, served
from tests.support.swarm.swarm_lab import Lab, Reference

KEYS = {"alice": "alices-key", "bob": "bobs-secret"}


async def _usage(caller: Caller, key: str, method: str = "GET", path: str = "") -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return await caller.http.request(method, f"/v1/usage{path}", headers=headers)


def test_usage_counts_requests_tokens_and_trips_of_a_key(tiny: Reference) -> None:
    prompt = list(range(2, 40))

    async def scenario(_lab: Lab, caller: Caller) -> Any:
        for body in (completion_body(prompt, max_tokens=8), completion_body([*prompt, 5], max_tokens=4)):
            answer = await caller.post("/v1/completions", body, "alices-key")
            assert answer.status_code == 200, answer.text
        return [(await _usage(caller, key)).json() for key in KEYS.values()]

    alice, bob = served(tiny, scenario, keys=KEYS)
    assert (alice["requests"], alice["prompt_tokens"], alice["completion_tokens"]) == (2, 77, 12)
    assert alice["cached_tokens"] == 38
    assert 0 < alice["trips"] <= 12
    assert bob == dict.fromkeys(alice, 0) | {"object": "usage", "running": []}


@defence(
    "a key sees and cancels no requests of other keys",
    off=replacing(KeyAccounts, "__missing__", lambda self, _: self.get("") or self._add("")),
)
def test_only_the_key_of_a_running_request_cancels_it(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        body = completion_body(max_tokens=400)
        asked = asyncio.create_task(caller.post("/v1/completions", body, "alices-key"))
        await asyncio.sleep(0.5)
        [running] = (await _usage(caller, "alices-key")).json()["running"]
        assert running["completion_tokens"] > 0
        assert (running["endpoint"], running["prompt_tokens"]) == ("/v1/completions", 2)
        other = await _usage(caller, "bobs-secret", "DELETE", f"/{running['id']}")
        assert other.status_code == 404
        assert refused(other)[2] == "request_not_found"
        assert (await _usage(caller, "bobs-secret")).json()["running"] == []
        own = await _usage(caller, "alices-key", "DELETE", f"/{running['id']}")
        assert own.json()["cancelled"]
        assert refused(await asked) == (499, None, "cancelled")
        assert (await _usage(caller, "alices-key")).json()["running"] == []
        assert caller.served.batcher.load.active == 0

    served(tiny, scenario, keys=KEYS)
