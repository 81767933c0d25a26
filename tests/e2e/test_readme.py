"""What the README tells a newcomer to type works, word for word."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.commands import family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

README = Path(__file__).parents[2] / "README.md"
ANSWER_TIMEOUT_S = 120


def blocks() -> dict[str, str]:
    """The fenced blocks that have a name, in a comment before them."""
    return dict(re.findall(r"<!-- (.+?) -->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL))


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory and home, with the environment's programs first on the path."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(script: str) -> str:
    command = ["bash", "-euc", script]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=ANSWER_TIMEOUT_S, check=True
    ).stdout


@contextmanager
def terminal(script: str) -> Iterator[subprocess.Popen[str]]:
    """A shell in which a node has started; its processes end with the context, if not before."""
    shell = subprocess.Popen(["bash", "-euc", script], stdout=subprocess.PIPE, text=True)
    try:
        assert shell.stdout is not None
        for line in shell.stdout:
            if line.startswith("  --bootstrap "):
                break
        else:
            raise AssertionError(f"this did not start a node: {script}")
        yield shell
    finally:
        for member in family(shell.pid) if shell.poll() is None else ():
            with suppress(psutil.NoSuchProcess):
                member.kill()
        shell.communicate()


def test_three_nodes_by_hand_answer_and_stop(newcomer: Path) -> None:
    typed = blocks()
    with ExitStack() as stack:
        nodes = [stack.enter_context(terminal(typed[f"terminal {number}"])) for number in (1, 2, 3)]
        assert "Paris" in shell(typed["terminal 4"])
        (newcomer / "ask.py").write_text(typed["python"])
        assert "The capital of France is" in shell("python ask.py")
        status = shell(typed["finish"])
        assert "20:30 of 30" in status
        nodes[2].communicate(timeout=60)
        assert nodes[2].returncode == 0


def test_the_readme_names_every_command() -> None:
    import typer

    from swarmnet.cli import app

    text = README.read_text()
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    assert [name for name in commands if f"swarmnet {name}" not in text] == []
