"""Members take weights from each other: verified, shared out, behind sessions; from the hub what no
peer has."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from swarmnet_protocols.errors import ConfigError, IntegrityError, SwarmnetError, Unreachable
from swarmnet_protocols.fetching import download, hub_ranges, peers
from swarmnet_protocols.fetching.pieces import PIECE_BYTES, Tables
from swarmnet_protocols.fetching.server import Library
from swarmnet_protocols.models import LocalModel, parts, resolve
from swarmnet_protocols.models.shared_weights import SharedWeights
from swarmnet_protocols.net.protocol_ids import WEIGHTS
from swarmnet_protocols.wire import weights_pb2 as pb
from tests.defences import defence, replacing
from tests.support.models.big_model import FLOAT32, load, make_tables, same_span, save_big, sent, weight_bytes
from tests.support.models.model_hub import ModelHub, model_hub
from tests.support.models.tiny_models import save_tiny, write_gguf
from tests.support.swarm.weight_swarm import TIMING, WeightSwarm, weight_swarm


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_big(tmp_path_factory.mktemp("big") / "model")


@pytest.fixture(scope="module")
def made(big: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The tables of the model, and its pieces hash."""
    return make_tables(big, tmp_path_factory.mktemp("maker"))


@pytest.fixture
def hub(big: Path, tmp_path: Path) -> Iterator[ModelHub]:
    with model_hub(big, tmp_path / "hf") as serving:
        yield serving


@pytest.fixture
def swarm() -> Iterator[WeightSwarm]:
    with weight_swarm() as running:
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ranges, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(download, "PAUSE_S", 0.01)
    # on a busy machine too, peers are faster than the hub
    monkeypatch.setattr(download, "HUB_WAIT_S", 60.0)


@pytest.fixture
def whole(big: Path, tmp_path: Path) -> LocalModel:
    model = resolve(str(big), cache_dir=tmp_path / "whole")
    model.verify()
    return model


def newcomer(swarm: WeightSwarm, tmp_path: Path, pieces_hash: bytes | None, name: str = "new") -> LocalModel:
    model = load(tmp_path / name)
    swarm.join(model, pieces_hash)
    return model


def test_a_second_host_of_the_same_blocks_takes_half_from_peers(
    hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, made: tuple[Path, bytes], tmp_path: Path
) -> None:
    first = load(tmp_path / "first", made[0])
    first.load_span(30, 40, **FLOAT32)
    before = sent(hub)
    assert before < 0.13
    swarm.host(first.shared())
    second = newcomer(swarm, tmp_path, made[1])
    assert same_span(second, whole, 30, 40)
    assert sent(hub) - before < before / 2
    from_peers = sum(count for name, count in second.parts.bytes_from.items() if name != "the hub")
    assert from_peers > 0.06 * weight_bytes(hub)


def test_the_hub_gives_what_no_peer_has(
    hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, made: tuple[Path, bytes], tmp_path: Path
) -> None:
    first = load(tmp_path / "first", made[0])
    first.load_span(30, 35, **FLOAT32)
    swarm.host(first.shared())
    second = newcomer(swarm, tmp_path, made[1])
    assert same_span(second, whole, 30, 40)
    assert "the hub" in second.parts.bytes_from
    assert len(second.parts.bytes_from) == 2


def test_pieces_come_from_several_peers_while_the_hub_is_down(
    hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, made: tuple[Path, bytes], tmp_path: Path
) -> None:
    second = newcomer(swarm, tmp_path, made[1])
    hosts = {swarm.host(whole.shared()) for _ in range(3)}
    hub.is_closed = True
    assert same_span(second, whole, 0, 80)
    assert second.parts.bytes_from.keys() == {f"peer {host}" for host in hosts}


class Lying(SharedWeights):
    """Flips a bit of every tensor that it serves."""

    def place(self, file: bytes, start: int, end: int) -> tuple[Path, int] | None:
        found = super().place(file, start, end)
        if found is None:
            return None
        path = Path(f"{found[0]}.flipped")
        if not path.exists():
            path.write_bytes(bytes(byte ^ 1 for byte in found[0].read_bytes()))
        return path, found[1]


def lying(model: LocalModel) -> Lying:
    return Lying(model.manifest, model._checkpoint, model.parts)


def test_a_piece_with_a_flipped_bit_is_refused_and_fetched_elsewhere(
    big: Path, hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, made: tuple[Path, bytes], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in big.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    liar = swarm.host(lying(verified(copy, tmp_path)))
    second = newcomer(swarm, tmp_path, made[1])
    assert same_span(second, whole, 30, 33)
    assert second.parts.bytes_from.keys() == {"the hub"}
    third = newcomer(swarm, tmp_path, made[1], "third")
    hub.is_closed = True
    with pytest.raises(SwarmnetError, match=f"peer {liar}: it sent wrong bytes"):
        third.load_span(30, 33, **FLOAT32)
    honest = swarm.host(whole.shared())
    assert same_span(third, whole, 30, 33)
    assert third.parts.bytes_from.keys() == {f"peer {honest}"}


def verified(path: Path, tmp_path: Path) -> LocalModel:
    model = resolve(str(path), cache_dir=tmp_path / "copied")
    model.verify()
    return model


@defence("what a peer claims is not believed", off=replacing(Tables, "claim", Tables.add))
def test_without_a_pieces_hash_peers_only_confirm_what_the_hub_sends(
    hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, tmp_path: Path
) -> None:
    swarm.host(whole.shared())
    second = newcomer(swarm, tmp_path, None)
    assert same_span(second, whole, 30, 40)
    assert second.parts.bytes_from.keys() == {"the hub"}
    assert sent(hub) < 0.13


def test_without_hub_or_pieces_hash_files_are_proved_by_their_hash(
    hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, tmp_path: Path
) -> None:
    host = swarm.host(whole.shared())
    second = newcomer(swarm, tmp_path, None)
    hub.is_closed = True
    assert same_span(second, whole, 30, 33)
    assert second.parts.bytes_from.keys() == {f"peer {host}"}
    assert second.parts.bytes_from[f"peer {host}"] > 0.04 * weight_bytes(hub)


class Equal:
    """Equals every hash."""

    def __ne__(self, other: object) -> bool:
        return False


@defence(
    "a claimed table is known when the whole file has its hash",
    off=replacing(parts, "hash_pieces", lambda *_: SimpleNamespace(sha256=Equal())),
)
def test_a_false_table_does_not_prove_a_file(
    hub: ModelHub, swarm: WeightSwarm, big: Path, tmp_path: Path
) -> None:
    """A peer that has other weights and a table of them, under the name of the file."""
    other = save_big(tmp_path / "other")
    for path in other.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    forged = resolve(str(other), cache_dir=tmp_path / "forged")
    forged.verify()
    true_files = resolve(str(big), cache_dir=tmp_path / "true").manifest.files
    swarm.host(
        Forged(
            forged.shared(),
            forged,
            {a.sha256: b.sha256 for a, b in zip(true_files, forged.manifest.files, strict=True)},
            resolve(str(big), cache_dir=tmp_path / "true").manifest.hash,
        )
    )
    second = newcomer(swarm, tmp_path, None)
    hub.is_closed = True
    with pytest.raises(IntegrityError, match="have another file of this name"):
        second.load_span(30, 31, **FLOAT32)
    hub.is_closed = False
    assert same_span(second, resolve(str(big), cache_dir=tmp_path / "true"), 30, 31)


class Forged:
    """Serves one model under the hashes of another one."""

    def __init__(self, real: SharedWeights, _: LocalModel, files: dict[bytes, bytes], model: bytes) -> None:
        self._real, self._files, self.model = real, files, model

    def document(self, what: pb.What, file: bytes) -> bytes:
        return self._real.document(what, self._files.get(file, file))

    def place(self, file: bytes, start: int, end: int) -> tuple[Path, int] | None:
        return self._real.place(self._files.get(file, file), start, end)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (bytes, "were expected"),
        (lambda size: b"", None),
    ],
    ids=["too long", "not here"],
)
def test_a_document_has_a_bounded_size(
    document: Callable[[int], bytes], error: str | None, swarm: WeightSwarm
) -> None:
    class Sending:
        model = bytes(32)

        def document(self, what: pb.What, file: bytes) -> bytes:
            return document(5_000_000)

        def place(self, file: bytes, start: int, end: int) -> None:
            return None

    host = swarm.host(Sending())

    async def ask() -> bytes:
        transport = await swarm._transport()
        typed = await WEIGHTS.open(transport, host)
        return await peers.fetch_document(typed, bytes(32), pb.WHAT_TABLE, max_bytes=1000)

    if error is None:
        assert swarm.loop.run(ask()) == b""
    else:
        with pytest.raises(IntegrityError, match=error):
            swarm.loop.run(ask())


@pytest.mark.parametrize(
    "request_",
    [
        pb.WeightsRequest(manifest=bytes(32), what=pb.WHAT_MANIFEST, length=10),
        pb.WeightsRequest(what=pb.WHAT_DATA, length=PIECE_BYTES + 1),
        pb.WeightsRequest(what=pb.WHAT_DATA),
        pb.WeightsRequest(length=10),
    ],
    ids=["another model", "too much", "nothing", "no kind"],
)
def test_a_wrong_request_is_refused(
    request_: pb.WeightsRequest, swarm: WeightSwarm, whole: LocalModel
) -> None:
    host = swarm.host(whole.shared())
    if not request_.manifest:
        request_.manifest = whole.manifest.hash

    async def ask() -> None:
        transport = await swarm._transport()
        typed = await WEIGHTS.open(transport, host)
        await typed.send(request_)
        await typed.receive()

    with pytest.raises(SwarmnetError, match=r"not here|closed the stream"):
        swarm.loop.run(ask())


def test_nothing_outside_the_model_is_served(swarm: WeightSwarm, whole: LocalModel) -> None:
    shared = whole.shared()
    file = whole.manifest.files[0]
    assert shared.place(file.sha256, 0, file.size) is not None
    assert shared.place(file.sha256, 0, file.size + 1) is None
    assert shared.place(bytes(32), 0, 1) is None
    assert shared.document(pb.WHAT_TABLE, bytes(32)) == b""


def test_a_file_that_was_not_verified_is_not_served(big: Path, tmp_path: Path) -> None:
    unread = resolve(str(big), cache_dir=tmp_path / "unread")
    weights = next(file for file in unread.manifest.files if file.name.endswith(".safetensors"))
    assert unread.shared().place(weights.sha256, 0, 10) is None
    unread.verify()
    assert unread.shared().place(weights.sha256, 0, 10) is not None


def test_weights_stand_back_while_sessions_are_open(swarm: WeightSwarm) -> None:
    class Slow:
        model = bytes(32)

        def document(self, what: pb.What, file: bytes) -> bytes:
            time.sleep(0.02)
            return bytes(10)

        def place(self, file: bytes, start: int, end: int) -> None:
            return None

    def seconds(library: Library, *, is_busy: bool) -> float:
        host = swarm.host(library, lambda: is_busy)

        async def ask() -> float:
            transport = await swarm._transport()
            typed = await WEIGHTS.open(transport, host)
            began = time.monotonic()
            for _ in range(4):
                await peers.fetch_document(typed, bytes(32), pb.WHAT_TABLE, max_bytes=1000)
            return time.monotonic() - began

        return swarm.loop.run(ask())

    # The pause after a reply is three times as long as the reply took: after three of four replies.
    assert seconds(Slow(), is_busy=True) >= 4 * 0.02 + 3 * 3 * 0.02
    assert TIMING.client_silence_s > 1


def test_a_newcomer_joins_without_the_hub(
    hub: ModelHub, swarm: WeightSwarm, whole: LocalModel, made: tuple[Path, bytes], tmp_path: Path
) -> None:
    hub.is_closed = True
    cache = tmp_path / "new"
    with pytest.raises(Unreachable):
        load(cache)
    swarm.host(whole.shared())
    swarm.outline(whole.manifest.hash, made[1], cache)
    second = load(cache)
    assert second.manifest.hash == whole.manifest.hash
    swarm.join(second, made[1])
    assert same_span(second, whole, 30, 40)
    assert all(name.startswith("peer ") for name in second.parts.bytes_from)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_model_that_no_hub_has_comes_from_peers_alone(
    kind: str, swarm: WeightSwarm, tmp_path: Path
) -> None:
    if kind == "gguf":
        source = write_gguf(tmp_path / "tiny.gguf", "llama")
    else:
        source = save_tiny("llama-untied", tmp_path / "tiny")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"w": 0}))).save_pretrained(source)
    own = resolve(str(source), cache_dir=tmp_path / "own")
    own.verify()
    assert own.pieces_hash is not None
    cache = tmp_path / "new"
    with pytest.raises(ConfigError, match="there is no model"):
        resolve(source.name, cache_dir=cache)
    with pytest.raises(Unreachable):
        swarm.outline(own.manifest.hash, own.pieces_hash, cache, source.name)
    swarm.host(own.shared())
    swarm.outline(own.manifest.hash, own.pieces_hash, cache, source.name)
    second = resolve(source.name, cache_dir=cache)
    assert second.manifest.hash == own.manifest.hash
    with pytest.raises(Unreachable):
        second.load_span(0, 1, **FLOAT32)
    swarm.join(second, own.pieces_hash)
    assert same_span(second, own, 0, 3)
    assert second.tokenizer().get_vocab() == own.tokenizer().get_vocab()


def test_the_outline_of_another_model_is_refused(
    swarm: WeightSwarm, whole: LocalModel, made: tuple[Path, bytes], tmp_path: Path
) -> None:
    wanted = bytes(32)
    swarm.host(Forged(whole.shared(), whole, {}, wanted))
    with pytest.raises(Unreachable, match="the manifest of another model"):
        swarm.outline(wanted, made[1], tmp_path / "new")
