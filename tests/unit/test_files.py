"""Files are there whole or not at all."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from swarmnet_protocols.machine.files import make_private, replacing, write_whole


def test_what_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_folder_that_is_made_is_its_owners_with_all_that_was_missing_above_it(tmp_path: Path) -> None:
    """``~/.local/share/swarmnet/client`` is made before ``~/.local/share/swarmnet``, which holds keys too."""
    (tmp_path / "open").mkdir(mode=0o755)
    write_whole(tmp_path / "open" / "data" / "client" / "file", b"1")
    make_private(tmp_path / "open" / "data" / "client")
    modes = [(tmp_path / "open" / name).stat().st_mode & 0o777 for name in (".", "data", "data/client")]
    assert modes == [0o755, 0o700, 0o700]
