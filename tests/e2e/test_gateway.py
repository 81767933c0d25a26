"""Real clients against ``swarmnet serve`` over real nodes, one of which dies in the middle of an
answer."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch

from swarmnet.gateway.batches import store
from swarmnet.gateway.routing.router import FEATURES, Router
from swarmnet_protocols.models import resolve
from tests.support.models.peft_oracle import with_lora
from tests.support.processes.commands import LOOPBACK, SWARMNET, TIMEOUT_S, RunningCommand
from tests.support.processes.faults import kill
from tests.support.processes.gateway_process import GatewayProcess
from tests.support.processes.nodes import RunProcess, Swarm, swarm

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
KEY = "a-key-for-tests"
STORY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Swarm]:
    """Two nodes that are needed and two of which one may die."""
    with swarm(tmp_path_factory.mktemp("gateway") / "lab", cache_dir, (0, 15), (15, 30), (15, 30)) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(lab: Swarm) -> Iterator[GatewayProcess]:
    file = lab.directory / "api.key"
    file.write_text(KEY)
    file.chmod(0o600)
    with GatewayProcess(lab, "--api-key-file", str(file)) as process:
        yield process


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[Any]:
    with gateway.openai(api_key=KEY) as opened:
        yield opened


def test_openais_client_works_unchanged(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(**STORY, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == STORY["max_tokens"]
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    chunks = list(
        client.chat.completions.create(**STORY, stream=True, stream_options={"include_usage": True})
    )
    assert (
        "".join(part.delta.content or "" for chunk in chunks for part in chunk.choices)
        == choice.message.content
    )
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    sampled = client.completions.create(model=MODEL, prompt="The sea", max_tokens=5, n=2, seed=1, logprobs=2)
    assert len({each.text for each in sampled.choices}) == 2
    assert all(len(each.logprobs.tokens) == 5 for each in sampled.choices)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**STORY, functions=[{"name": "f"}])
    assert (caught.value.param, caught.value.code) == ("functions", "unsupported_parameter")
    varied = client.chat.completions.create(**STORY, frequency_penalty=2.0, presence_penalty=2.0)
    assert varied.choices[0].message.content != choice.message.content
    forced = client.completions.create(
        model=MODEL, prompt="The sea", max_tokens=3, logit_bias={"40": 100}, logprobs=0
    )
    assert len(set(forced.choices[0].logprobs.tokens)) == 1
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another-key").models.list()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_an_endpoint_of_a_swarm_has_auto_adapters_and_batches(lab: Swarm, tmp_path: Path) -> None:
    whole = resolve(MODEL, cache_dir=lab.cache_dir).load_whole(
        dtype=torch.float32, device=torch.device("cpu")
    )
    with_lora(whole, ["q_proj", "v_proj"]).save_pretrained(tmp_path / "law")
    law, adapter = f"{MODEL}:law", ("--adapter", f"{MODEL}:law={tmp_path / 'law'}")
    file = tmp_path / "router.safetensors"
    Router((MODEL, "a model that nobody hosts"), np.zeros((2, FEATURES), np.float32)).write(file)
    with (
        GatewayProcess(lab, "--router", str(file), *adapter, all_models=True) as process,
        process.openai() as client,
    ):
        assert [model.id for model in client.models.list()] == [MODEL, law, "auto"]
        asked = {**STORY, "model": "auto", "max_tokens": 4}
        plain = client.chat.completions.create(**asked)
        assert plain.model == MODEL
        tuned = client.chat.completions.create(**{**asked, "model": law})
        assert (tuned.model, tuned.choices == plain.choices) == (law, False)
        line = json.dumps({"custom_id": "one", **asked, "model": law}).encode()
        sent = client.files.create(file=("prompts.jsonl", line), purpose="batch")
        path = "/v1/chat/completions"
        batch = client.batches.create(input_file_id=sent.id, endpoint=path, completion_window="24h")
        while batch.status in store.UNFINISHED:
            batch = client.batches.retrieve(batch.id)
        answer = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == tuned.choices[0].message.content


def test_langchain_works_unchanged(gateway: GatewayProcess) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{gateway.url}/v1",
        api_key=SecretStr(KEY),
        temperature=0,
        max_completion_tokens=12,
        max_retries=0,
    )
    question = [("system", "You are brief."), ("human", "What is the capital of France?")]
    answer = chat.invoke(question)
    assert answer.content
    assert answer.usage_metadata is not None
    assert "".join(str(part.content) for part in chat.stream(question)) == answer.content


@pytest.fixture
def closed_loop() -> Iterator[None]:
    """An event loop for a client that asks asyncio for one, which would never be closed."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.usefixtures("closed_loop")
def test_litellm_works_unchanged(gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the web for prices
    import litellm

    reach = {"model": f"openai/{MODEL}", "api_base": f"{gateway.url}/v1", "max_retries": 0}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    said: dict[str, Any] = {**reach, "api_key": KEY, "messages": question, "temperature": 0}
    answer: Any = litellm.completion(**said, max_tokens=12)
    parts: Any = litellm.completion(**said, max_tokens=12, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.choices[0].message.content
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    answer = litellm.completion(
        **said, max_tokens=60, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**said, "api_key": "another-key"})


def test_anthropics_and_ollamas_clients_work_unchanged(gateway: GatewayProcess) -> None:
    import anthropic
    import ollama

    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    with anthropic.Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        said: Any = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}, "messages": question}
        answer = client.messages.create(**said)
        with client.messages.stream(**said) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**said, "model": "claude"})
    theirs: Any = ollama.Client(gateway.url, headers={"authorization": f"Bearer {KEY}"})
    assert [model.model for model in theirs.list().models] == [f"{MODEL}:latest"]
    options = {"temperature": 0, "num_predict": 12}
    whole = theirs.chat(MODEL, question, options=options)
    assert whole.message.content == answer.content[0].text
    parts = theirs.chat(f"{MODEL}:latest", question, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert theirs.generate(MODEL, "The sea", raw=True, options=options).response
    (vector,) = theirs.embed(MODEL, "The sea").embeddings
    assert len(vector) == 576
    assert theirs.show(MODEL).capabilities
    with pytest.raises(ollama.ResponseError, match="there is no model"):
        theirs.chat("llama3", question)
    theirs.close()


RECORDED = Path(__file__).parents[1] / "data" / "agents.json"
FORCED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"tool_choice": {"type": "any"}, "max_tokens": 40},
    "/v1/responses": {"tool_choice": "required", "max_output_tokens": 40},
    "/v1/chat/completions": {"tool_choice": "required", "max_tokens": 40},
}
ENDS = ("event: message_stop", "event: response.completed", "event: response.incomplete", "data: [DONE]")


@pytest.mark.parametrize("recorded", json.loads(RECORDED.read_text()), ids=lambda each: each["agent"])
def test_requests_of_real_agents_get_calls(recorded: dict[str, Any], gateway: GatewayProcess) -> None:
    """The second requests of a turn as `python -m tests.agents` records them, with all tools of the
    agents and shorter texts. The agents leave the choice of a call to the model."""
    path = recorded["path"]
    body = recorded["body"] | {"temperature": 0} | FORCED[path]
    head = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{gateway.url}{path}", json=body, headers=head, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    tools = [each.get("function", each).get("name") for each in body["tools"]]
    assert any(f'"name":"{name}"' in answer.text for name in tools), answer.text
    assert any(end in answer.text for end in ENDS), answer.text


CHOICES = (
    ("Question: What do plants need to make food?\nAnswer:", " sunlight", " sand", " plastic", " salt"),
    ("Question: Which planet is known as the Red Planet?\nAnswer:", " Venus", " Mars", " Saturn", " Pluto"),
    ("Question: At what temperature does water freeze?\nAnswer:", " 0 degrees", " 50 degrees", " 90 degrees"),
    ("Question: Which animal lays eggs?\nAnswer:", " a dog", " a hen", " a cow", " a horse"),
    ("Question: What pulls objects toward the Earth?\nAnswer:", " light", " sound", " gravity", " heat"),
)


@torch.inference_mode()
def test_multiple_choice_scores_as_with_local_transformers(client: Any, cache_dir: Path) -> None:
    """As lm-eval reads: the last log probability is the generated token's, also if it ends the
    answer."""
    local = resolve(MODEL, cache_dir=cache_dir)
    whole = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    encode = local.vocabulary().tokenizer.encode
    for question, *answers in CHOICES:
        start, ours, theirs = encode(question), [], []
        for answer in answers:
            ids = [*start, *encode(answer)]
            asked = client.completions.create(model=MODEL, prompt=ids, max_tokens=1, logprobs=1, echo=True)
            found = asked.choices[0].logprobs.token_logprobs
            assert len(found) == len(ids) + 1
            ours.append(sum(found[len(start) : -1]))
            rows = whole(torch.tensor([ids])).logits[0].log_softmax(-1)
            scores = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
            theirs.append(sum(scores[len(start) - 1 :]))
        order = range(len(answers))
        assert sorted(order, key=ours.__getitem__) == sorted(order, key=theirs.__getitem__)


def test_a_node_killed_in_mid_answer_is_not_noticed(lab: Swarm, client: Any, gateway: GatewayProcess) -> None:
    """The victim computes this answer: a host may also have the sessions of an audit alone."""
    replaceable = {
        node.ready["peer_id"]: node for name, node in lab.nodes.items() if name.startswith("15-30")
    }
    story = STORY | {"max_tokens": 96}
    undisturbed = client.chat.completions.create(**story).choices[0].message.content
    failovers = _failovers(gateway)
    text = ""
    struck = None
    for chunk in client.chat.completions.create(**story, stream=True, stream_options={"include_trace": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        route = chunk.model_extra.get("swarmnet", {}).get("route", ())
        if struck is None and route:
            struck = next(replaceable[hop["peer"]] for hop in route if hop["peer"] in replaceable)
            kill(struck)
    assert struck is not None
    assert text == undisturbed
    assert _failovers(gateway) > failovers


def _failovers(gateway: GatewayProcess) -> float:
    metrics = httpx.get(f"{gateway.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    name = f'swarmnet_gateway_failovers{{model_name="{MODEL}"}} '
    return float(next(line.removeprefix(name) for line in metrics.splitlines() if line.startswith(name)))


def test_costly_bodies_leave_answers_and_memory_alone(client: Any, gateway: GatewayProcess) -> None:
    undisturbed = client.chat.completions.create(**STORY).choices[0].message.content
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    head = f'{{"model":"{MODEL}","prompt":['.encode()
    bodies = [
        head + item * (size // len(item)) for item in (b"{},", b"-1,", b"[],") for size in (1 << 16, 8 << 20)
    ]
    text, statuses = "", []
    for chunk in client.chat.completions.create(**STORY, stream=True):
        text += chunk.choices[0].delta.content or ""
        if text and bodies:
            answer = httpx.post(f"{gateway.url}/v1/completions", content=bodies.pop(), headers=headers)
            statuses.append(answer.status_code)
    assert text == undisturbed
    assert len(statuses) == 6
    assert set(statuses) <= {400, 413}
    assert process.memory_info().rss - before < 64 << 20


def test_a_gateway_that_is_told_to_stop_finishes_the_answer_that_runs(
    gateway: GatewayProcess, client: Any
) -> None:
    text = ""
    told = False
    reasons = []
    for chunk in client.chat.completions.create(**STORY, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        if text and not told:
            told = True
            gateway.send_signal(signal.SIGTERM, children=False)
    assert reasons[-1] == "length"
    assert gateway.wait_for_end() == 0
    assert [event["event"] for event in gateway.events] == ["ready", "draining", "stopped"]
    assert gateway.log.read_text() == ""


def test_run_asks_the_endpoint_that_a_node_of_this_machine_serves(
    lab: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    node = lab.launch("endpoint", "--blocks", "0:1", "--serve", "0")
    assert httpx.get(f"{node.wait('endpoint')['url']}/models").json()["data"][0]["id"] == MODEL
    for alone in ((), ("--alone",)):
        data_dir = tmp_path / f"client{len(alone)}"
        run = RunProcess(lab, "The sea", 4, LOOPBACK, "--data-dir", str(data_dir), *alone)
        code, answer = run.finish()
        assert (code, len(answer["token_ids"])) == (0, 4)
        has_opened_a_chain = bool(list(data_dir.glob("client/guards/*")))
        assert has_opened_a_chain == bool(alone)
    node.kill()


AGENT = f"""#!{sys.executable}
import json, os, pathlib, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
body = {{"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 4}}
body["messages"] = [{{"role": "user", "content": "Hello"}}]
head = {{"authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"], "content-type": "application/json"}}
request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), head)
with urllib.request.urlopen(request) as answer:
    pathlib.Path("answer.json").write_text(json.dumps({{"url": url, **json.load(answer)}}))
raise SystemExit(7)
"""


def test_an_agent_has_an_endpoint_that_ends_with_it(lab: Swarm, tmp_path: Path) -> None:
    program, file = tmp_path / "claude", tmp_path / "swarm.toml"
    program.write_text(AGENT)
    program.chmod(0o755)
    file.write_text(
        lab.file.read_text().replace("bootstrap = []", f"bootstrap = {json.dumps(lab.bootstrap)}")
    )
    found = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    found |= {name: str(tmp_path / name) for name in ("XDG_STATE_HOME", "XDG_DATA_HOME")}
    command = [*SWARMNET, "agent", "claude", "--swarm", str(file), "--model", MODEL]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **found}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["usage"]["output_tokens"] == 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(answer["url"])


def test_a_killed_batch_loses_and_doubles_no_answer(lab: Swarm) -> None:
    """The first process has prompts that it cannot finish before it is killed."""
    prompts, out = lab.directory / "prompts.jsonl", lab.directory / "answers.jsonl"
    shared = "Answer in one word. The lighthouse stands on a rock in the sea, and "
    lines = [{"prompt": f"{shared}{n:02}", "max_tokens": 4, "temperature": 0} for n in range(40)]
    endless = [line | {"max_tokens": 2000, "ignore_eos": True} for line in lines[20:]]
    where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
    command = ("batch", str(prompts), "--out", str(out), "--at-once", "4", *where)
    prompts.write_text("\n".join(map(json.dumps, lines[:20] + endless)))
    with RunningCommand(command, lab.directory / "batch.log") as first:
        first.wait("answers", done=8)
        first.kill()
    prompts.write_text("\n".join(map(json.dumps, lines)))
    with RunningCommand(command, lab.directory / "batch.log") as second:
        done = second.wait("done")
        assert second.wait_for_end() == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in answers) == sorted(f"line-{n}" for n in range(1, 41))
    assert all(each["response"]["status_code"] == 200 for each in answers)
    assert 8 <= done["kept"] <= 20
    assert (done["completed"], done["failed"]) == (40, 0)
