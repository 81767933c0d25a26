"""A damaged swarm file is refused, or has the same content: never a valid file with other
content."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet import swarm_file
from swarmnet.swarm_file import writer as swarm_writer
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet_protocols.errors import ConfigError, IncompatibleVersion, IntegrityError

PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"


def _made(*, is_open: bool) -> tuple[SwarmFile, bytes]:
    with TemporaryDirectory() as directory:
        new = NewSwarm("lab", bootstrap=(PEER,), is_open=is_open)
        file = swarm_writer.create(Path(directory), new, now=1_800_000_000.0)
        return file, Path(directory, "swarm.toml").read_bytes()


MADE = {is_open: _made(is_open=is_open) for is_open in (False, True)}


@given(data=st.data(), is_open=st.booleans())
def test_changed_bytes_are_refused_or_change_nothing(data: st.DataObject, is_open: bool) -> None:
    file, encoded = MADE[is_open]
    damaged = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    try:
        read = swarm_file.parse(bytes(damaged))
    except (ConfigError, IncompatibleVersion, IntegrityError):
        return
    assert read == (replace(file, bootstrap=read.bootstrap) if is_open else file)


@given(cut=st.integers(0, 2000), is_open=st.booleans())
def test_a_truncated_file_is_refused_or_has_the_same_content(cut: int, is_open: bool) -> None:
    file, encoded = MADE[is_open]
    try:
        assert swarm_file.parse(encoded[:cut]) == file
    except (ConfigError, IntegrityError):
        assert cut < len(encoded)


@given(data=st.binary(max_size=2000) | st.text(max_size=2000).map(str.encode))
def test_random_data_is_refused(data: bytes) -> None:
    with pytest.raises((ConfigError, IntegrityError)):
        swarm_file.parse(data)
