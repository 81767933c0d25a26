"""The commands of the README and the guides work as they stand. The tests share one swarm: the
README's three nodes."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.house.doc_blocks import blocks, follow, shell, terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty directory to be in, with the environment's programs first on the path and nothing
    kept from before."""
    there = tmp_path_factory.mktemp("newcomer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for variable in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(variable, str(there / variable))
        patch.chdir(there)
        yield there


@pytest.fixture(scope="module")
def swarm(newcomer: Path) -> Iterator[dict[str, str]]:
    """The README's command blocks by name, while its three nodes run."""
    typed = {block.kind: block.text for block in blocks(README)}
    with ExitStack() as stack:
        for number in (1, 2, 3):
            stack.enter_context(terminal(typed[f"terminal {number}"]))
        yield typed


def test_three_nodes_by_hand_answer(swarm: dict[str, str], newcomer: Path) -> None:
    assert "Paris" in shell(swarm["terminal 4"])
    (newcomer / "ask.py").write_text(swarm["python"])
    assert "The capital of France is" in shell("python ask.py")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_can_be_followed(guide: Path, swarm: dict[str, str]) -> None:
    follow(guide)


def test_a_node_is_stopped(swarm: dict[str, str]) -> None:
    assert "20:30 of 30" in shell(swarm["finish"])
