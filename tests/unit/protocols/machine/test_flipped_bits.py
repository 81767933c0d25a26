"""One bit of a stored or received file changes unnoticed: the file is refused, or made again.

Times and size of the file stay as they were, as when a disk fails, or an attacker changes the file.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarmnet.swarm_file import writer as swarm_writer
from swarmnet.swarm_file.stored import store_file, swarm_dir
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet_client.tuning import adapter_dir
from swarmnet_client.tuning import checkpoint as tune_checkpoint
from swarmnet_client.tuning.adapter_dir import check_adapter, hashes_of
from swarmnet_client.tuning.checkpoint import TuneCheckpoint
from swarmnet_node.training import checkpoint as training_checkpoint
from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.data import corpus
from swarmnet_node.training.job_store import load_stored_job, store_job
from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.models import resolve, resolver
from swarmnet_protocols.models.local_model import LocalModel
from swarmnet_protocols.training import jobs
from swarmnet_protocols.training.job_settings import DataSection
from swarmnet_protocols.training.jobs import open_job, seal_job
from swarmnet_protocols.wire.roles import Role
from tests.defences import defence, nothing, replacing, yes
from tests.support.models.tiny_models import save_tiny, write_gguf
from tests.support.network.private_swarm import AUTHORITY, EPOCH, PrivateSwarm, identity_of
from tests.support.training.tiny_job import for_others, tiny_job
from tests.support.training.torn_writes import JOB, checkpoint_of, plain_model

FLIPS = 100
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kept:
    """A file, and what reading it gives while it is whole."""

    path: Path
    read: Callable[[], object]


def weights_of(path: Path, cache: Path) -> object:
    return resolve(str(path), cache_dir=cache).load_span(0, 1, dtype=torch.float32, device=CPU) is not None


def a_file_of_a_model(name: str) -> Callable[[Path], Kept]:
    def make(folder: Path) -> Kept:
        model = save_tiny("llama-tied", folder / "model")
        return Kept(model / name, lambda: weights_of(model, folder / "cache"))

    return make


def gguf(folder: Path) -> Kept:
    path = write_gguf(folder / "tiny.gguf", "llama")
    return Kept(path, lambda: weights_of(path, folder / "cache"))


def a_file_of_a_checkpoint(name: str) -> Callable[[Path], Kept]:
    def make(folder: Path) -> Kept:
        checkpoints = CheckpointStore(folder)

        def read() -> object:
            found = checkpoints.load_newest(JOB)
            if found is None:
                raise IntegrityError("no checkpoint is whole")
            return found.round

        return Kept(checkpoints.save(checkpoint_of(3), plain_model) / name, read)

    return make


def tuning(folder: Path) -> Kept:
    path = folder / "checkpoint.safetensors"
    tensors = {"history": torch.zeros(3, 4), "momentum": torch.ones(40), "step": torch.tensor(7)}
    TuneCheckpoint(7, {"method": "lora", "seed": 3}, tensors).save(path)

    def read() -> object:
        kept = TuneCheckpoint.load(path)
        return kept and (
            kept.step,
            kept.about,
            {name: value.tolist() for name, value in kept.tensors.items()},
        )

    return Kept(path, read)


def a_file_of_an_adapter(name: str) -> Callable[[Path], Kept]:
    def make(folder: Path) -> Kept:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
        save_file({"lora_A": torch.ones(8, 8)}, folder / "adapter_model.safetensors")
        (folder / "tune.json").write_text(json.dumps({"files": hashes_of(folder)}))
        return Kept(folder / name, lambda: check_adapter(folder))

    return make


def swarm_file(folder: Path) -> Kept:
    path = folder / "swarm.toml"
    swarm_writer.create(folder, NewSwarm("lab"), now=EPOCH)
    store_file(folder / "data", path.read_bytes())
    return Kept(path, lambda: store_file(folder / "data", path.read_bytes()))


def known_swarm_file(folder: Path) -> Kept:
    file = swarm_writer.create(folder, NewSwarm("lab"), now=EPOCH)
    data = (folder / "swarm.toml").read_bytes()
    store_file(folder / "data", data)
    path = swarm_dir(folder / "data", file.swarm_id) / "swarm.toml"
    return Kept(path, lambda: store_file(folder / "data", data))


def certificate(folder: Path) -> Kept:
    swarm, alice = PrivateSwarm(), identity_of("alice").peer_id

    def membership() -> Membership:
        return Membership(swarm.rules, alice, lambda: EPOCH, folder=folder)

    membership().replace_certificate(swarm.certificate("alice", Role.CLIENT))
    return Kept(folder / "certificate", lambda: membership().me)


def revocations(folder: Path) -> Kept:
    """A damaged list is fetched again."""
    swarm, alice, mallory = PrivateSwarm(), identity_of("alice").peer_id, identity_of("mallory").peer_id

    def membership() -> Membership:
        return Membership(swarm.rules, alice, lambda: EPOCH, folder=folder)

    def read() -> object:
        if not (known := membership().revocations.serials):
            raise IntegrityError("the list is not taken")
        return known

    membership().add_revocations([swarm.revocation(mallory)])
    return Kept(folder / "revocations" / AUTHORITY.public_key.hex(), read)


def job(folder: Path) -> Kept:
    sealed = seal_job(for_others(tiny_job(folder)), AUTHORITY)
    opened = open_job(sealed)
    store_job(folder, opened, sealed)
    return Kept(folder / "jobs" / f"{opened.id}.job", lambda: load_stored_job(folder, opened.id)[0].id)


REFUSED: dict[str, Callable[[Path], Kept]] = {
    "the weights of a model": a_file_of_a_model("model.safetensors"),
    "the config of a model": a_file_of_a_model("config.json"),
    "a gguf file": gguf,
    "the model of a training checkpoint": a_file_of_a_checkpoint("model.safetensors"),
    "the optimizer of a training checkpoint": a_file_of_a_checkpoint("state/optimizer.safetensors"),
    "the progress of a training checkpoint": a_file_of_a_checkpoint("progress.json"),
    "the checkpoint of tune": tuning,
    "the weights of an adapter": a_file_of_an_adapter("adapter_model.safetensors"),
    "the config of an adapter": a_file_of_an_adapter("adapter_config.json"),
    "a swarm file": swarm_file,
    "the swarm file of a data directory": known_swarm_file,
    "a certificate": certificate,
    "revocations": revocations,
    "a job": job,
}
MAY_MEAN_THE_SAME = {"a swarm file", "the swarm file of a data directory"}
"""Files in which a flipped bit may leave the meaning unchanged: they have comments and white
space."""


@defence(
    "a model's files are hashed before they are read",
    off=replacing(LocalModel, "_check", nothing),
    name="the weights of a model",
)
@defence(
    "a gguf file is hashed before it is read",
    off=replacing(LocalModel, "_check", nothing),
    name="a gguf file",
)
@defence(
    "the progress of a checkpoint is hashed",
    off=replacing(training_checkpoint, "_hash_of", lambda _: "0"),
    name="the progress of a training checkpoint",
)
@defence(
    "every other file of a checkpoint is hashed",
    off=replacing(training_checkpoint, "sha256_of", lambda *_: bytes(32)),
    name="the optimizer of a training checkpoint",
)
@defence(
    "the checkpoint of tune is hashed",
    off=replacing(tune_checkpoint, "_hash_of", lambda *_: "0"),
    name="the checkpoint of tune",
)
@defence(
    "adapters of tune are hashed",
    off=replacing(adapter_dir, "_check_hashes", nothing),
    name="the weights of an adapter",
)
@defence("jobs are signed", off=replacing(jobs, "verify", yes), name="a job")
@pytest.mark.parametrize("name", REFUSED)
def test_a_file_with_a_flipped_bit_is_refused(name: str, tmp_path: Path) -> None:
    kept = REFUSED[name](tmp_path)
    whole = kept.read()
    refused = 0
    for _ in flipped(kept.path):
        try:
            assert kept.read() == whole
            assert name in MAY_MEAN_THE_SAME
        except (IntegrityError, ConfigError, NotAuthorised):
            refused += 1
    assert kept.read() == whole
    print(f"metric=refused of {FLIPS} flips in {name} value={refused} goal={FLIPS}")
    assert refused > FLIPS / 4


def tokens(name: str) -> Callable[[Path], Kept]:
    def make(folder: Path) -> Kept:
        (folder / "texts").mkdir()
        for number in range(20):
            (folder / "texts" / f"{number}.txt").write_text(f"document {number} " * 4)
        section = DataSection.model_validate(
            {"path": str(folder / "texts"), "sequence_length": 16, "validation": 0.4}
        )

        def read() -> object:
            tokenizer = corpus.tokenizer_of(section, folder / "cache")
            read = corpus.open_source(section, section.sources[0], tokenizer, folder / "cache")
            return read.digest, read.train.tolist()

        read()
        (part,) = (folder / "cache" / "tokens").glob(f"*/{name}")
        return Kept(part, read)

    return make


def manifest(folder: Path) -> Kept:
    model = save_tiny("llama-tied", folder / "model")
    resolve(str(model), cache_dir=folder / "cache")
    (index,) = (folder / "cache" / "manifests").iterdir()
    return Kept(index, lambda: resolve(str(model), cache_dir=folder / "cache").manifest)


MADE_ANEW = {
    "tokens": tokens("train.bin"),
    "what tokens are kept": tokens("corpus.json"),
    "a manifest": manifest,
}


@defence("cached tokens are hashed", off=replacing(corpus, "_digest", lambda _: "0"), name="tokens")
@defence("cached manifests are hashed", off=replacing(resolver, "_digest", lambda *_: "0"), name="a manifest")
@pytest.mark.parametrize("name", MADE_ANEW)
def test_derived_files_are_made_again(name: str, tmp_path: Path) -> None:
    kept = MADE_ANEW[name](tmp_path)
    whole, made = kept.read(), kept.path.read_bytes()
    for _ in flipped(kept.path):
        assert kept.read() == whole
        assert kept.path.read_bytes() == made


def test_a_config_that_was_read_from_gguf_is_read_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama")
    config = resolve(str(path), cache_dir=tmp_path / "cache").config
    (kept,) = (tmp_path / "cache" / "gguf").glob("*/config-*/config.json")
    made = kept.read_bytes()
    for _, _ in zip(flipped(kept), range(3), strict=False):  # transformers needs a long time for it
        again = resolve(str(path), cache_dir=tmp_path / "cache").config
        assert again.to_dict() == config.to_dict()
        assert kept.read_bytes() == made


def flipped(path: Path) -> Iterator[None]:
    """Flip one bit of the file for the duration of each iteration, ``FLIPS`` different bits in
    all."""
    whole, stat = path.read_bytes(), path.stat()
    for bit in random.Random(0).sample(range(8 * len(whole)), min(FLIPS, 8 * len(whole))):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        for content in (bytes(changed), whole):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            if content != whole:
                yield
