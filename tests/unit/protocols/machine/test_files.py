"""Files are written whole or not at all."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from swarmnet_protocols.machine.files import make_private, replacing, scratch_folder, write_whole

HOLD_SCRATCH_FOLDER = """
import sys
from pathlib import Path
from swarmnet_protocols.machine.files import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def process_with_a_scratch_folder(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_SCRATCH_FOLDER, parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_whole(path, b"new")
    with suppress(KeyError), replacing(path) as fresh:
        fresh.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        raise KeyError
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_a_file_is_its_owners_unless_it_is_given_to_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "folder" / "mine", b"1")
    write_whole(tmp_path / "folder" / "mine", b"2")
    write_whole(tmp_path / "folder" / "everybodys", b"3", mode=0o644)
    assert {
        path.name: (path.stat().st_mode & 0o777, path.read_bytes())
        for path in (tmp_path / "folder").iterdir()
    } == {
        "mine": (0o600, b"2"),
        "everybodys": (0o644, b"3"),
    }
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_a_folder_is_made_for_its_owner_alone_with_all_folders_above(tmp_path: Path) -> None:
    """``~/.local/share/swarmnet/client`` is made before ``~/.local/share/swarmnet``, which holds
    keys too."""
    (tmp_path / "open").mkdir(mode=0o755)
    write_whole(tmp_path / "open" / "data" / "client" / "file", b"1")
    make_private(tmp_path / "open" / "data" / "client")
    modes = [(tmp_path / "open" / name).stat().st_mode & 0o777 for name in (".", "data", "data/client")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_scratch_folder_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    with suppress(KeyError), scratch_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_the_next_scratch_folder_removes_those_of_killed_processes(tmp_path: Path) -> None:
    older = tmp_path / "swarmnet-without-a-lock"
    older.mkdir()
    with (
        process_with_a_scratch_folder(tmp_path) as (_, used),
        process_with_a_scratch_folder(tmp_path) as (killed, abandoned),
    ):
        killed.kill()  # SIGKILL
        killed.wait()
        assert (abandoned / "socket").exists()
        (tmp_path / "swarmnet-link").symlink_to(abandoned)
        with scratch_folder(tmp_path) as fresh:
            assert {path.name for path in tmp_path.iterdir()} == {
                *(path.name for path in (older, used, fresh)),
                "swarmnet-link",
            }
            assert (used / "socket").exists()
