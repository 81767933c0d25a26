"""The tensor store: partial downloads, verification, eviction, and two processes at once."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models.tensor_store import TensorStore

DATA = bytes(range(256)) * 20_000
DIGEST = hashlib.sha256(DATA).digest()


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    return TensorStore(tmp_path / "tensors")


def put(store: TensorStore, data: bytes) -> bytes:
    digest = hashlib.sha256(data).digest()
    with store.download(digest, len(data)) as partial:
        assert partial is not None
        partial.write(data)
        partial.complete()
    return digest


def test_a_whole_tensor_is_found(store: TensorStore) -> None:
    assert store.find(DIGEST) is None
    put(store, DATA)
    path = store.find(DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is None
    assert [entry.is_whole for entry in store.entries()] == [True]


def test_a_download_goes_on_where_it_was_cut_off(store: TensorStore) -> None:
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        partial.write(DATA[:3_000_000])
    assert store.find(DIGEST) is None
    with TensorStore(store.root).download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        assert partial.written == 3_000_000
        partial.write(DATA[3_000_000:])
        assert partial.complete().read_bytes() == DATA


def test_a_download_that_brought_nothing_leaves_no_file(store: TensorStore) -> None:
    with store.download(DIGEST, len(DATA)):
        pass
    assert store.entries() == []


@pytest.mark.parametrize("sent", [DATA[:-1], DATA[:-1] + b"x"], ids=["too short", "a flipped bit"])
def test_bytes_that_do_not_match_are_discarded(store: TensorStore, sent: bytes) -> None:
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        partial.write(sent)
        with pytest.raises(IntegrityError):
            partial.complete()
        assert partial.written == 0
        partial.write(DATA)
        partial.complete()
    assert store.find(DIGEST) is not None


def test_an_endless_source_writes_no_more_than_the_tensor(store: TensorStore) -> None:
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        partial.write(DATA)
        with pytest.raises(IntegrityError):
            partial.write(b"x")
        partial.complete()
    assert [entry.size for entry in store.entries()] == [len(DATA)]


def test_a_partial_file_that_is_too_long_is_fetched_anew(store: TensorStore) -> None:
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        partial.write(DATA)
    with store.download(DIGEST, 100) as partial:
        assert partial is not None
        assert partial.written == 0


def test_a_second_download_waits_for_the_first(store: TensorStore) -> None:
    found: list[bool] = []

    def second() -> None:
        with store.download(DIGEST, len(DATA)) as partial:
            found.append(partial is None)

    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        thread = threading.Thread(target=second)
        thread.start()
        partial.write(DATA)
        partial.complete()
    thread.join(10)
    assert found == [True]
    assert len(store.entries()) == 1


def test_a_killed_download_holds_no_lock(store: TensorStore) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from swarmnet_protocols.models.tensor_store import TensorStore\n"
        f"with TensorStore(Path(sys.argv[1])).download(bytes.fromhex('{DIGEST.hex()}'), {len(DATA)}) as partial:\n"
        "    partial.write(bytes(range(256)) * 100); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(store.root)], check=False)
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        assert partial.written == 25_600
        partial.write(DATA[25_600:])
        partial.complete()


def test_the_least_recently_used_tensors_are_evicted_first(store: TensorStore) -> None:
    digests = [put(store, bytes([number]) * 1000) for number in range(4)]
    for age, digest in enumerate(digests):
        path = store.find(digest)
        assert path is not None
        os.utime(path, (1000 + age, 1000 + age))
    store.find(digests[0])  # used just now
    assert store.evict(2000, keep={digests[1]}) == 2000
    assert {entry.digest for entry in store.entries()} == {digests[0], digests[1]}
    assert store.evict(0, keep=digests) == 0


def test_a_download_under_way_is_not_removed(store: TensorStore) -> None:
    with store.download(DIGEST, len(DATA)) as partial:
        assert partial is not None
        partial.write(DATA)
        assert store.evict(0) == 0
        partial.complete()
    assert store.evict(0) == len(DATA)


def test_foreign_files_are_neither_listed_nor_evicted(store: TensorStore) -> None:
    (store.root / "ab").mkdir(parents=True)
    foreign = store.root / "ab" / "notes"
    foreign.write_text("mine")
    assert store.entries() == []
    assert store.evict(0) == 0
    assert foreign.exists()


def test_a_full_disk_is_an_error_with_a_hint(store: TensorStore) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from swarmnet_protocols.errors import OutOfResources\n"
        "from swarmnet_protocols.models.tensor_store import TensorStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"with TensorStore(Path(sys.argv[1])).download(bytes.fromhex('{DIGEST.hex()}'), {len(DATA)}) as partial:\n"
        "    try: partial.write(bytes(range(256)) * 1000)\n"
        "    except OutOfResources as error: print(error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store.root)], check=True, capture_output=True, text=True
    )
    assert "--max-disk" in done.stdout
    assert store.find(DIGEST) is None
