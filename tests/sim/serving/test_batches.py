"""Files and batches of a gateway, with OpenAI's client, and the file of answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from swarmnet.gateway import accounts, parsing
from swarmnet.gateway.accounts import Account, KeyAccounts, Quota
from swarmnet.gateway.batches import queue, store
from swarmnet.gateway.batches.answering import LineAnswerer
from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import BatchLine, checked_ids, read_lines, windows_by_prefix
from swarmnet.gateway.batches.store import BatchStore
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.parsing import BodyParser
from swarmnet.gateway.protocols.kept_responses import KeptResponses
from swarmnet.paths import locked_data_dir
from swarmnet_protocols.errors import ConfigError
from tests.defences import Patch, defence, nothing, replacing
from tests.sim.serving.test_models import MEMORY, in_swarm, name_of, swarm_gateway
from tests.support.swarm.gateway import COMMON, Caller, continued, refused, served
from tests.support.swarm.swarm_lab import Lab, Reference, simulate
from tests.support.swarm.tiny_swarm import load_tiny

KEYS = {"alice": "alices-key", "bob": "bobs-secret"}
COMPLETIONS = "/v1/completions"


def _client(caller: Caller, key: str = "alices-key") -> Any:
    return openai.AsyncOpenAI(
        base_url="http://127.0.0.1/v1", api_key=key, http_client=caller.http, max_retries=0
    )


def _lines(*prompts: str, **fields: Any) -> bytes:
    about = {**COMMON, "max_tokens": 4, **fields}
    lines = [
        {"custom_id": f"n{n}", "method": "POST", "url": COMPLETIONS, "body": {**about, "prompt": prompt}}
        for n, prompt in enumerate(prompts)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


IDS = {"a": "x"}


async def _begin(client: Any, content: bytes) -> Any:
    file = await client.files.create(file=("prompts.jsonl", content), purpose="batch")
    assert file.bytes == len(content)
    return await client.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", metadata={"a": "b"}
    )


async def _ended(client: Any, batch: Any) -> Any:
    while batch.status in store.UNFINISHED:
        await asyncio.sleep(0.5)
        batch = await client.batches.retrieve(batch.id)
    return batch


def test_openais_client_runs_a_batch(tiny: Reference, tmp_path: Path) -> None:
    prompts = [f"w{n} w7 w8" for n in range(5, 25)]

    async def scenario(_lab: Lab, caller: Caller) -> Any:
        client = _client(caller)
        too_many = {"custom_id": "many", "prompt": ["w5"] * 16, "n": 2}
        lines = _lines(*prompts, "w5 " * 9000) + json.dumps(too_many).encode() + b"\n"
        batch = await _begin(client, lines)
        batch = await _ended(client, batch)
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert len((await client.files.list()).data) == 2
        output = (await client.files.content(batch.output_file_id)).text
        direct = await caller.post(
            COMPLETIONS, {**COMMON, "prompt": prompts[3], "max_tokens": 4}, "alices-key"
        )
        usage = await caller.http.get("/v1/usage", headers={"authorization": "Bearer alices-key"})
        return batch, [json.loads(line) for line in output.splitlines()], direct.json(), usage.json()

    batch, answers, direct, usage = served(tiny, scenario, keys=KEYS, batches=tmp_path)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (22, 20, 2)
    by_id = {each["custom_id"]: each["response"] for each in answers}
    assert len(by_id) == len(answers) == 22
    assert by_id["n3"]["body"]["choices"] == direct["choices"]
    assert by_id["n20"]["status_code"] == by_id["many"]["status_code"] == 400
    assert usage["requests"] == 21


def test_lines_of_a_batch_name_their_models(tiny: Reference, tmp_path: Path) -> None:
    beta = load_tiny(tmp_path / "beta", blocks=4)

    async def scenario(lab: Lab, other: Lab) -> None:
        async with swarm_gateway(lab, other, max_bytes=MEMORY, batches=tmp_path) as caller:
            names = name_of(lab), name_of(other), "tiny", ""
            about = {**COMMON, "prompt": [5, 6], "max_tokens": 4}
            lines = [{**about, "custom_id": f"of {name}", "model": name} for name in names]
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            client = _client(caller)
            batch = await _ended(client, await _begin(client, content))
            output = (await client.files.content(batch.output_file_id)).text
            answers = [json.loads(line) for line in output.splitlines()]
            found = {each["custom_id"]: each["response"] for each in answers}
            for name, model in zip(names, (tiny, beta), strict=False):
                body = found[f"of {name}"]["body"]
                assert (body["model"], body["choices"][0]["text"]) == (
                    name,
                    continued(model.greedy([5, 6], 4)),
                )
            assert [found[f"of {name}"]["status_code"] for name in names] == [200, 200, 404, 404]

    in_swarm(tiny, beta, scenario)


@defence(
    "a key sees no files and batches of other keys",
    off=replacing(KeyAccounts, "__missing__", lambda self, _: self.get("") or self._add("")),
)
def test_a_key_sees_no_batch_of_another(tiny: Reference, tmp_path: Path) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        batch = await _begin(_client(caller), _lines("w5"))
        other = _client(caller, "bobs-secret")
        for asked in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.content(batch.input_file_id),
        ):
            try:
                await asked()
            except openai.NotFoundError:
                continue
            pytest.fail("another key reached the batch")
        assert (await other.batches.list()).data == []

    served(tiny, scenario, keys=KEYS, batches=tmp_path)


def test_a_batch_goes_on_after_a_restart(tiny: Reference, tmp_path: Path) -> None:
    prompts = [f"w{n}" for n in range(5, 45)]

    async def begin(_lab: Lab, caller: Caller) -> Any:
        client = _client(caller, "-")
        batch = await _begin(client, _lines(*prompts, max_tokens=40))
        while not batch.request_counts or not batch.request_counts.completed:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
        for used in (batch.input_file_id, batch.output_file_id):
            with pytest.raises(openai.ConflictError, match="cancel the batch first"):
                await client.files.delete(used)
        return batch.id

    async def end(_lab: Lab, caller: Caller) -> Any:
        client = _client(caller, "-")
        batch = await _ended(client, await client.batches.retrieve(identity))
        return batch, (await client.files.content(batch.output_file_id)).text

    identity = served(tiny, begin, batches=tmp_path)
    batch, output = served(tiny, end, batches=tmp_path)
    assert batch.status == "completed"
    assert sorted(json.loads(line)["custom_id"] for line in output.splitlines()) == sorted(
        f"n{n}" for n in range(40)
    )


def test_a_cancelled_batch_ends_at_once_also_in_the_queue(
    tiny: Reference, tmp_path: Path, monkeypatch: Patch
) -> None:
    at_once = LineAnswerer.answer

    async def answer(self: LineAnswerer, line: BatchLine) -> dict[str, Any]:
        if line.body["prompt"] == "slow":
            await asyncio.Event().wait()
        return await at_once(self, line)

    monkeypatch.setattr(LineAnswerer, "answer", answer)

    async def scenario(_lab: Lab, caller: Caller) -> None:
        client = _client(caller, "-")
        batches = [await _begin(client, _lines(prompt)) for prompt in ("slow", "slow", "w5")]
        await asyncio.sleep(1)  # the first one begins
        first = batches[0]
        for batch, status in zip(batches, ("in_progress", "validating"), strict=False):
            assert (await client.batches.retrieve(batch.id)).status == status
        queued = await client.batches.cancel(batches[1].id)
        first = await client.batches.retrieve(first.id)
        assert (queued.status, first.status) == ("cancelled", "in_progress")
        running = await client.batches.cancel(first.id)
        assert (running.status, running.cancelled_at is None) == ("cancelled", False)
        with pytest.raises(openai.ConflictError, match="is cancelled"):
            await client.batches.cancel(first.id)
        assert (await _ended(client, batches[2])).status == "completed"
        listed = [(each.id, each.status) async for each in client.batches.list()]
        states = ("completed", "cancelled", "cancelled")
        assert listed == [(each.id, state) for each, state in zip(batches[::-1], states, strict=True)]

    served(tiny, scenario, batches=tmp_path)


def test_lines_of_a_forming_model_do_not_hold_up_others(tiny: Reference, tmp_path: Path) -> None:
    beta = load_tiny(tmp_path / "beta", blocks=4)

    async def scenario(lab: Lab) -> None:
        other = lab.beside(beta)
        await lab.start_all({"a": (0, 4), "b": (4, 6)})
        await other.start("c", other.hosting((0, 2)))
        forming, there = name_of(other), name_of(lab)
        assert forming < there, "lines are sorted by model"
        about = {**COMMON, "prompt": [5, 6], "max_tokens": 1}
        lines = [{**about, "model": forming} for _ in range(queue.AT_ONCE + 4)] + [{**about, "model": there}]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        async with swarm_gateway(lab, other, batches=tmp_path) as caller:
            client = _client(caller)
            batch = await _begin(client, content)
            while batch.status in store.UNFINISHED and batch.request_counts.completed == 0:
                await asyncio.sleep(0.1)
                batch = await client.batches.retrieve(batch.id)
            assert (batch.status, batch.request_counts.completed) == ("in_progress", 1)
            await other.start("d", other.hosting((2, 4)))
            batch = await _ended(client, batch)
            assert (batch.status, batch.request_counts.completed) == ("completed", len(lines))

    simulate(tiny, scenario)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    async def run(folder: Path) -> Account:
        accounts = KeyAccounts(Quota(), lambda: 0.0)
        answerer: Any = None
        async with queue.BatchQueue(folder, accounts, answerer, BodyParser(512), lambda: 0.0).running():
            return accounts[""]

    with pytest.raises(ConfigError, match="it is a file"):
        asyncio.run(run(file))
    with locked_data_dir(tmp_path / "elsewhere"), pytest.raises(ApiError, match="another endpoint"):
        _ = asyncio.run(run(tmp_path / "elsewhere")).files


FILE = b'--b\r\nContent-Disposition: form-data; name="file"'
BAD_FORMS = [
    ("application/json", b"{}", "invalid_form"),
    ("multipart/form-data", FILE, "invalid_form"),
    ("multipart/form-data; boundary=b", FILE, "missing_required_parameter"),
    ("multipart/form-data; boundary=b", FILE + b"; filename*=\0''x\r\n\r\n{}\r\n--b--", "invalid_form"),
    ("multipart/form-data; boundary=b", FILE + b"\r\n\r\n{}\r\n--b--", "invalid_value"),
]


def test_a_form_without_a_file_for_batches_is_refused(tiny: Reference, tmp_path: Path) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> list[str]:
        found = []
        for kind, body, _ in BAD_FORMS:
            answer = await caller.http.post("/v1/files", content=body, headers={"content-type": kind})
            assert answer.status_code == 400
            found.append(refused(answer)[2])
        return found

    assert served(tiny, scenario, batches=tmp_path) == [code for *_, code in BAD_FORMS]


LIMITS = {"MAX_FILES": 3, "MAX_KEY_BYTES": 6, "MAX_BATCHES": 3, "MAX_UNFINISHED": 3}
USUAL = {name: getattr(store, name) for name in LIMITS}


def _unlimited(patch: Patch) -> None:
    for name in LIMITS:
        patch.setattr(store, name, 10**9)
    patch.setattr(queue, "MAX_LINES", 10**9)


ENDS = {
    "MAX_FILES": (1, "too_many_files"),
    "MAX_KEY_BYTES": (400, "too_many_files"),
    "MAX_LINES": (1, "invalid_line"),
}


@defence("{name} ends a batch", off=_unlimited, cases=[{"name": name} for name in ENDS])
@pytest.mark.parametrize("name", ENDS)
def test_a_batch_beyond_a_limit_fails(name: str, tiny: Reference, tmp_path: Path, monkeypatch: Patch) -> None:
    where, (most, code) = queue if name == "MAX_LINES" else store, ENDS[name]
    if getattr(where, name) != 10**9:
        monkeypatch.setattr(where, name, most)

    async def scenario(_lab: Lab, caller: Caller) -> Any:
        client = _client(caller, "-")
        batch = await _ended(client, await _begin(client, _lines("w5", "w6")))
        with pytest.raises(openai.BadRequestError, match="metadata"):
            await client.batches.create(
                input_file_id=batch.input_file_id,
                endpoint=COMPLETIONS,
                completion_window="24h",
                metadata={"a": "b" * 513},
            )
        return batch

    batch = served(tiny, scenario, batches=tmp_path)
    assert (batch.status, batch.errors.data[0].code if batch.errors else None) == ("failed", code)


@defence("{name} bounds what a key stores", off=_unlimited, cases=[{"name": name} for name in LIMITS])
@pytest.mark.parametrize("name", LIMITS)
def test_files_and_batches_of_a_key_are_bounded(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    now = [1000.0]
    files = BatchStore(tmp_path, "alice", lambda: now[0])
    if getattr(store, name) == USUAL[name]:
        monkeypatch.setattr(store, name, LIMITS[name])

    async def fill() -> None:
        for _ in range(4):
            if name in ("MAX_FILES", "MAX_KEY_BYTES"):
                await files.add_file("a", "batch", b"{}")
            else:
                files.add_batch({"status": "completed" if name == "MAX_BATCHES" else "validating"})

    with pytest.raises(ApiError):
        asyncio.run(fill())
    kind = "file" if (tmp_path / "key").exists() else "batch"
    (tmp_path / "file-torn.jsonl").write_text("the object of this file was never written")
    again = BatchStore(tmp_path, "alice", lambda: now[0])
    assert len(again.objects(kind)) == 3
    assert again.objects(kind) == files.objects(kind)
    now[0] += store.KEPT_S
    assert again.objects(kind) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"key"}


@defence(
    "the containers of a line are counted before it is parsed",
    off=replacing(parsing, "MAX_CONTAINERS", 10**9),
    why="objects and lists",
)
@defence("a line has a longest length", off=replacing(BodyParser, "max_bytes", 1 << 30), why="longer than")
@pytest.mark.parametrize(
    ("why", "begin", "each", "end", "times"),
    [
        ("objects and lists", b'{"prompt": "a", "x": [', b"{},", b"{}]}", 1 << 15),
        ("longer than", b'{"prompt": "', b"aa", b'"}', 1 << 22),
    ],
)
def test_a_huge_line_is_refused_before_it_is_parsed(
    why: str, begin: bytes, each: bytes, end: bytes, times: int, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + begin + each * times + end)
    with pytest.raises(ConfigError, match=f"line 2 .*{why}"):
        checked_ids(read_lines(path, ""))


@defence("batches wait for the quota of their key", off=replacing(Account, "_refusal", nothing))
@defence("batches leave quota to other requests", off=replacing(accounts, "BATCHES_LEAVE", 1e-9))
def test_a_batch_waits_for_the_quota_and_leaves_some_of_it(tiny: Reference, tmp_path: Path) -> None:
    async def scenario(_lab: Lab, caller: Caller) -> None:
        clock = asyncio.get_running_loop().time
        alice, bob, began = _client(caller), _client(caller, "bobs-secret"), clock()
        batch = await _begin(alice, _lines(*(f"w{n}" for n in range(5, 13))))
        other = await _ended(bob, await _begin(bob, _lines("w5")))
        assert other.request_counts.completed == 1, "a key that waits keeps no other key waiting"
        asked = {**COMMON, "prompt": "w5", "max_tokens": 1}
        assert (await caller.post(COMPLETIONS, asked, "alices-key")).status_code == 200
        batch = await _ended(alice, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 8)
        assert clock() - began > 60, "two lines at once, then one in 15 s"

    served(tiny, scenario, keys=KEYS, batches=tmp_path, quota=Quota(requests_per_minute=4))


def test_a_batch_takes_no_place_from_other_requests_of_its_key() -> None:
    async def main() -> None:
        account = Account("alice", Quota(concurrent=1), KeptResponses(lambda: 0.0), None)
        began = asyncio.Event()

        async def line() -> None:
            async with account.admitted_later(1):
                began.set()

        async with account.admitted_later(1):
            with account.admitted(1):
                later = asyncio.create_task(line())
                with pytest.raises(ApiError, match="at a time"), account.admitted(1):
                    pytest.fail("the quota has one place")
            await asyncio.sleep(0)
            assert not began.is_set()
        await later
        with pytest.raises(ApiError, match="choices at once"):
            async with account.admitted_later(2):
                pytest.fail("the line is larger than the quota")

    asyncio.run(main())


def test_a_torn_last_line_of_answers_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer = {"id": "x", "custom_id": "a", "response": {"status_code": 200}}
    with Journal.open(path, IDS) as journal:
        journal.append(answer)
        with pytest.raises(ConfigError), Journal.open(path, IDS):
            pytest.fail("two processes write one file")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-5])
    with Journal.open(path, IDS) as journal:
        assert (journal.ids, journal.completed) == ({"a": "x"}, 1)
        assert path.read_bytes() == whole


def test_a_file_that_is_no_journal_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one line without an end"}')
    with pytest.raises(ConfigError, match="not a file of answers"), Journal.open(path, IDS):
        pytest.fail("somebody's file became a journal")
    assert "one line" in path.read_text()


def test_lines_are_read_checked_and_sorted_by_prefix(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "b c"}\n\n{"prompt": "a"}\n{"custom_id": "x", "prompt": "b a"}\n')
    lines = list(read_lines(path, "m"))
    assert list(checked_ids(lines)) == ["line-1", "line-3", "x"]
    assert [each.body["prompt"] for window in windows_by_prefix(lines) for each in window] == [
        "a",
        "b a",
        "b c",
    ]
    for bad, why in (
        ("[]", "no JSON object|not a JSON object"),
        ("{", "not JSON"),
        ('{"url": "/v1/x", "body": {}}', "url is one of"),
        ('{"custom_id": 1, "prompt": "a"}', "custom_id is a text"),
        ('{"custom_id": "line-1"}', "has no prompt"),
    ):
        path.write_text(bad + "\n")
        with pytest.raises(ConfigError, match=why):
            list(read_lines(path, "m"))
    path.write_text('{"custom_id": "x", "prompt": "a"}\n' * 2)
    with pytest.raises(ConfigError, match="two lines"):
        checked_ids(read_lines(path, "m"))
