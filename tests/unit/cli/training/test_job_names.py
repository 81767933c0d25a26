"""A job is named by its name, the first digits of its id, or its job file."""

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from swarmnet.cli import execute
from swarmnet.cli.training import job_names
from swarmnet.cli.training.job_names import find_here, job_here, job_in_swarm, jobs_here, only, short_ids
from swarmnet_node.training.job_store import own_jobs, store_job
from swarmnet_protocols.directory.catalog import made_jobs
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.job_records import JOB_LIFETIME_S, job_announcement
from swarmnet_protocols.training.jobs import open_job, seal_job
from swarmnet_protocols.training.methods import outside
from tests.defences import defence, replacing
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.training.tiny_job import for_others, tiny_job
from tests.support.training.workers import SWARM, write_job

ONE, TWO, THREE = "aabb" + "1" * 60, "aacc" + "2" * 60, "beef" + "3" * 60
NAMES = {ONE: "small", TWO: "small", THREE: "aabb"}
OWNER = Identity.from_seed(b"owner")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ONE, ONE),
        ("aabb", THREE),
        ("aabb1", ONE),
        ("beef", THREE),
        ("bee", None),
        ("large", None),
        ("feed", None),
    ],
    ids=["an id", "a name before digits", "digits", "four digits", "too few digits", "no name", "no digits"],
)
def test_a_name_or_first_digits_find_a_job(text: str, found: str | None) -> None:
    assert only(text, NAMES) == found


def test_a_name_of_several_jobs_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"names 2 jobs: aabb1111 \(small\), aacc2222 \(small\)"):
        only("small", NAMES)


def test_a_shown_id_is_long_enough_to_name_one_job() -> None:
    ids = ["0" * 64, "0" * 12 + "1" * 52, "f" * 64]
    assert list(short_ids(ids).values()) == ["0" * 13, "0" * 12 + "1", "f" * 8]


def sealed_job(folder: Path, seed: int, owner: Identity = OWNER) -> bytes:
    folder.mkdir(exist_ok=True)
    return seal_job(for_others(tiny_job(folder, job={"seed": seed})), owner)


def test_a_damaged_job_file_hides_no_other_job(tmp_path: Path) -> None:
    sealed = sealed_job(tmp_path, 1)
    store_job(tmp_path, open_job(sealed), sealed)
    (tmp_path / "jobs" / f"{ONE}.job").write_text("torn")
    (tmp_path / "jobs" / "notes.job").write_text("of the user")
    assert jobs_here(tmp_path) == {open_job(sealed).id: "tiny", ONE: ""}
    assert own_jobs(tmp_path, OWNER.public_key) == [open_job(sealed).id]
    assert own_jobs(tmp_path, Identity.from_seed(b"other").public_key) == []


def test_a_job_file_names_the_job_that_was_made_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, copy = tmp_path / "job.toml", tmp_path / "copy.toml"
    file.write_text(write_job(tmp_path, "diloco", "sync_every = 2"))
    assert execute(["swarm", "create", "lab", "--open", "--no-mdns", "--out", str(tmp_path)]) == 0
    here = ["--data-dir", str(tmp_path / "d")]
    capsys.readouterr()
    create = ["train", "create", str(file), "--swarm", str(tmp_path), *here]
    assert execute(create) == 0
    out, err = capsys.readouterr()
    assert "swarmnet train join tiny --swarm" in err
    shutil.copy(file, copy)
    assert find_here(str(copy), tmp_path / "d") == out.strip()
    assert job_here(out[:6], tmp_path / "d") == job_here("tiny", tmp_path / "d") == out.strip()

    file.write_text(file.read_text().replace("rounds = 5", "rounds = 6"))
    with pytest.raises(ConfigError, match=r"made no job from .* as it is now") as caught:
        find_here(str(file), tmp_path / "d")
    assert f"swarmnet train create {file}" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot read the job file"):
        find_here(str(tmp_path / "none.toml"), tmp_path / "d")
    assert execute(create) == 0
    capsys.readouterr()

    assert execute(["train", "list", *here]) == 0
    listed = capsys.readouterr().out
    assert listed.count("tiny  ") == 2
    assert "no worker yet, 6 rounds to do" in listed
    assert execute(["train", "plot", "tiny", "--out", str(tmp_path / "plots"), *here]) == 3
    assert "'tiny' names 2 jobs" in capsys.readouterr().err
    assert execute(["train", "export", "huge", "--out", str(tmp_path / "model"), *here]) == 3
    assert "swarmnet train list" in capsys.readouterr().err


@defence("digits of an id need four", off=replacing(job_names, "MIN_PREFIX", 1))
def test_fewer_than_four_digits_name_no_job() -> None:
    assert only("aac", NAMES) is None


def test_a_strangers_job_of_the_same_name_is_listed(tmp_path: Path) -> None:
    """The stranger's job replaces none: whoever joins by this name must choose."""
    mine, foreign = sealed_job(tmp_path / "a", 1), sealed_job(tmp_path / "b", 2, Identity.from_seed(b"other"))

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile())
        board = MemoryBoard(network, lambda: 1e9)

        async def publish(name: bytes, sealed: bytes) -> MemoryDirectory:
            directory = MemoryDirectory(board, Identity.from_seed(name), SWARM)
            await job_announcement(sealed).publish(directory)
            await made_jobs([open_job(sealed).id, "00" * 32], JOB_LIFETIME_S).publish(directory)
            return directory

        async with (
            network.transport(OWNER.peer_id),
            network.transport(Identity.from_seed(b"other").peer_id),
        ):
            directory = await publish(b"owner", mine)
            assert await job_in_swarm("tiny", directory) == open_job(mine).id
            await publish(b"other", foreign)
            with pytest.raises(ConfigError, match="names 2 jobs"):
                await job_in_swarm("tiny", directory)
            assert await job_in_swarm(open_job(mine).id[:10], directory) == open_job(mine).id
            assert await job_in_swarm("00" * 32, directory) == "00" * 32, "a whole id needs no list"
            with pytest.raises(ConfigError, match="no job in this swarm"):
                await job_in_swarm("huge", directory)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("model_type", "said"), [("gpt2", "GPT2LMHeadModel cannot be split into blocks"), ("llama", "")]
)
def test_an_owner_hears_that_hosts_cannot_serve_a_model(
    model_type: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_job(tmp_path, "diloco", "sync_every = 2").replace('"llama"', f'"{model_type}"')
    (tmp_path / "job.toml").write_text(toml)
    assert execute(["swarm", "create", "lab", "--open", "--no-mdns", "--out", str(tmp_path)]) == 0
    command = ["train", "create", str(tmp_path / "job.toml"), "--swarm", str(tmp_path)]
    assert execute([*command, "--data-dir", str(tmp_path / "d")]) == 0
    err = capsys.readouterr().err
    assert said in err
    assert ("hosts cannot serve it" in err) == bool(said)


METHOD_FILE = """
from swarmnet_protocols.training.methods.base import Settings

class SETTINGS(Settings):
    pass

class METHOD:
    name = "{}"
"""


@pytest.mark.parametrize("name", ["half-way", "diloco"])
def test_a_method_file_without_the_jobs_method_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with the name of a built-in method would not be used either."""
    monkeypatch.setattr(outside, "_loaded", {})
    (tmp_path / "job.toml").write_text(write_job(tmp_path, "diloco", "sync_every = 2"))
    (tmp_path / "method.py").write_text(METHOD_FILE.format(name))
    assert execute(["swarm", "create", "lab", "--open", "--no-mdns", "--out", str(tmp_path)]) == 0
    command = ["train", "create", str(tmp_path / "job.toml"), "--swarm", str(tmp_path)]
    options = ["--method-file", str(tmp_path / "method.py"), "--data-dir", str(tmp_path / "d")]
    assert execute([*command, *options]) == 3
    assert f"and not by the method in {tmp_path / 'method.py'}: {name}" in capsys.readouterr().err
    assert jobs_here(tmp_path / "d") == {}
