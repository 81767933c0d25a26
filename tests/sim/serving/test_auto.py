"""The model ``auto`` of a gateway: a router gives each question to one of the swarm's models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnet.gateway.routing.router import Router, features
from tests.sim.serving.test_models import in_swarm, name_of, swarm_gateway
from tests.support.swarm.gateway import Caller, refused, served
from tests.support.swarm.swarm_lab import Lab, Reference, simulate
from tests.support.swarm.tiny_swarm import load_tiny

ONE, OTHER = "w5 w6 w7", "w70 w80 w90"
"""Questions that the router gives to the one model and to the other."""


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("beta")
    return load_tiny(folder, blocks=4)


def router_of(one: str, other: str) -> Router:
    return Router((one, other), np.stack([features(ONE), features(OTHER)]))


def asked(text: str) -> dict[str, dict[str, Any]]:
    """A request for one token in each protocol."""
    messages = [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w8"}]
    messages.append({"role": "user", "content": text})
    return {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/completions": {"prompt": text, "max_tokens": 1},
        "/v1/responses": {"input": messages, "max_output_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/api/chat": {"messages": messages, "stream": False, "options": {"num_predict": 1}},
        "/api/generate": {"prompt": text, "stream": False, "options": {"num_predict": 1}},
    }


async def answer(caller: Caller, path: str, **fields: Any) -> Any:
    response = await caller.post(path, {"model": "auto", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_auto_names_the_chosen_model_in_every_protocol(tiny: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab, other: Lab) -> None:
        names = name_of(lab), name_of(other)
        async with swarm_gateway(lab, other, router=router_of(*names)) as caller:
            for text, name in zip((ONE, OTHER), names, strict=True):
                for path, body in asked(text).items():
                    assert (await answer(caller, path, **body))["model"] == name, path
                counted = asked(text)["/v1/messages"]["messages"]
                assert (await answer(caller, "/v1/messages/count_tokens", messages=counted))["input_tokens"]
            streamed = await caller.chat(OTHER, model="auto", max_tokens=2, stream=True)
            assert f'"model":"{names[1]}"' in streamed.text
            first = await answer(caller, "/v1/responses", input=ONE, max_output_tokens=1)
            more = {"input": OTHER, "previous_response_id": first["id"], "max_output_tokens": 1}
            assert (await answer(caller, "/v1/responses", **more))["model"] == names[0]
            *_, listed = (await caller.http.get("/v1/models")).json()["data"]
            assert (listed["id"], listed["available"]) == ("auto", True)
            assert (await caller.http.get("/v1/models/auto")).json() == listed
            assert (await caller.http.get("/api/tags")).json()["models"][-1]["name"] == "auto:latest"
            assert (await answer(caller, "/api/show"))["name"] == "auto:latest"
            embedding = await caller.post("/v1/embeddings", {"model": "auto", "input": "w5"})
            assert refused(embedding) == (404, "model", "model_not_found")

    in_swarm(tiny, beta, scenario)


def test_auto_chooses_only_models_that_answer_now(tiny: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        await lab.start("a", lab.hosting((0, 4)))
        names = name_of(lab), name_of(other)
        async with swarm_gateway(lab, other, router=router_of("tiny", names[1])) as caller:
            early = await caller.complete(ONE, model="auto")
            assert refused(early)[::2] == (503, "model_forming")
            assert int(early.headers["retry-after"]) > 0
            assert [each["id"] for each in (await caller.http.get("/v1/models")).json()["data"]] == ["tiny"]
            assert (await caller.http.get("/v1/models/auto")).status_code == 404
        await other.start("c", other.hosting((0, 4)))
        async with swarm_gateway(lab, other, router=router_of(*names)) as caller:
            for text in (ONE, OTHER):
                body = asked(text)["/v1/completions"]
                assert (await answer(caller, "/v1/completions", **body))["model"] == names[1]

    simulate(tiny, scenario)


def test_auto_without_a_router_is_refused_with_what_to_do(tiny: Reference) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        response = await caller.complete(model="auto")
        assert refused(response) == (404, "model", "model_not_found")
        assert "serve --router FILE" in response.json()["error"]["message"]

    served(tiny, scenario)
