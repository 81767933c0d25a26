"""The README and the guides work as they stand: with the wheel, in a fresh home directory, on a
machine that has no compiler, no git and no clone. The tests share one swarm, the README's three
nodes."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from swarmnet_protocols.machine import native_code
from tests.support.dashboard.dashboards import states, watch
from tests.support.dashboard.pictures import portray, portray_terminal
from tests.support.dashboard.site import CHROMIUM, OPTIONS, looking, show
from tests.support.house.doc_blocks import blocks, follow, shell, terminal
from tests.support.network.local_lan import lan, why_not
from tests.support.processes.commands import Place, RunningCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
SOURCES = [*ROOT.glob("protocols/**/*.c"), *ROOT.glob("node/**/*.c")]
URL = re.compile(r"http://127\.0\.0\.1:\d+")
LIBRARIES = "swarmnet_protocols/machine/compiled"
PROGRAMS = ("bash", "cat", "curl", "env", "grep", "head", "ip", "tar")
"""Programs that guides use besides swarmnet and Python, and ``ip``, which makes the network of two
computers."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone, built as `make wheel` does."""
    folder = tmp_path_factory.mktemp("dist")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    # hatchling evaluates licences as Python, which the audit hook of tests ends
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], env=env, check=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel. Dependencies come from the tests' environment."""
    place = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    pip = (sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"))
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile")
    subprocess.run([*pip, "install", *options, str(wheel)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(beside))
    for program in PROGRAMS:
        found = shutil.which(program)
        assert found is not None, program
        (place / "bin" / program).symlink_to(found)
    return place


@pytest.fixture(scope="module")
def newcomer(installed: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's empty home directory, on a machine with few programs. The browser runs already,
    because it needs more programs."""
    home = tmp_path_factory.mktemp("newcomer")
    kept = {name: os.environ[name] for name in ("LANG", "PYTHONPATH") if name in os.environ}
    machine = {"PATH": str(installed / "bin"), "HOME": str(home), "OMP_NUM_THREADS": "1", **kept}
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - machine.keys():
            patch.delenv(name)
        for name, value in machine.items():
            patch.setenv(name, value)
        patch.chdir(home)
        yield home


@pytest.fixture(scope="module")
def swarm(newcomer: Path) -> Iterator[dict[str, str]]:
    """The README's command blocks by name, while its three nodes run."""
    typed = {block.kind: block.text for block in blocks(README)}
    with contextlib.ExitStack() as stack:
        for number in (1, 2, 3):
            stack.enter_context(terminal(typed[f"terminal {number}"]))
        yield typed


def test_the_wheel_fits_every_linux_that_torch_fits(wheel: Path, installed: Path) -> None:
    (policy,) = re.findall(r"-py3-none-manylinux_2_(\d+)_", wheel.name)
    assert int(policy) <= 28  # torch's own wheels
    (folder,) = installed.glob(f"lib/python*/site-packages/{LIBRARIES}")
    wanted = {
        native_code.library_name(source, target)
        for source in SOURCES
        for target in native_code.known_targets()
    }
    assert {library.name for library in folder.iterdir()} == wanted
    for library in folder.iterdir():
        needed = re.findall(rb"\0(lib[\w.-]+\.so[\w.]*)", library.read_bytes())
        assert set(needed) <= {b"libc.so.6", b"libm.so.6"}


def test_the_version_names_commit_and_kernels(newcomer: Path) -> None:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    env = {"PATH": os.defpath}
    commit = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout.strip()
    printed = shell("swarmnet --version")
    assert printed.startswith(f"swarmnet {version('swarmnet-p2p')}, commit {commit}")
    assert printed.endswith(f"kernels {native_code.targets()[0].name} from the wheel\n")


def test_three_nodes_by_hand_answer(swarm: dict[str, str], newcomer: Path) -> None:
    assert "Paris" in shell(swarm["terminal 4"])
    (newcomer / "ask.py").write_text(swarm["python"])
    assert "The capital of France is" in shell("python ask.py")


@pytest.fixture(scope="module")
def lab_page(swarm: dict[str, str]) -> Iterator[str]:
    """The address of a page of the README's swarm."""
    with showing("--swarm lab/swarm.toml --data-dir watcher") as url:
        yield url


@contextlib.contextmanager
def showing(options: str) -> Iterator[str]:
    with terminal(f"swarmnet dashboard {options} --port 0") as printed:
        (url,) = URL.findall(printed)
        yield url


Seen = tuple[str, dict[str, str]]
"""The path of a page, and what its parts must show."""


def operators_page(url: str) -> Seen:
    watch(url, lambda state: len(state["peers"]) == 4)
    return "/", {"h1 >> visible=true": "Complete, but without spare hosts", "dl.figures": "Peers4"}


def members_page(url: str) -> Seen:
    watch(url, lambda state: list(states(state).values()) == ["online"] * 2)
    return "/", {
        "h1 >> visible=true": "Incomplete: the model cannot answer",
        "#members": "our lab",
        "#members li >> nth=0": "member · client, host",
        "#members li >> nth=1": "4 uses left",
    }


def page_of_a_job(url: str) -> Seen:
    (job,) = json.loads(shell("swarmnet train list --json"))["jobs"]
    watch(url, lambda state: job["job"] in state["jobs"])
    return f"/jobs/{job['job']}", {"h1 >> visible=true": "stdlib-diloco", "#now": f"0 of {job['rounds']}"}


def page_of_answers(url: str) -> Seen:
    watch(url, lambda state: all(model["first_token_s"] for model in state["models"].values()))
    return "/", {"dl.figures": "95 % within", "#peers": "0:10"}


def page_of_the_kitchen(url: str) -> Seen:
    status = json.loads(shell("swarmnet status --json"))
    watch(url, lambda state: status["peer_id"] in state["peers"])
    start, end = status["blocks"]
    shown = {
        "h1 >> visible=true": "kitchen",
        "#span": f"Blocks {start}:{end} of 0:30",
        "#contribution": "positions × blocks",
    }
    return f"/peers/{status['peer_id']}", shown


SIGHTS: dict[str, tuple[str, str, Callable[[str], Seen]]] = {
    "operator": ("swarmnet dashboard", "", operators_page),
    "private-group": ("swarmnet swarm status", "--swarm group --data-dir group/node", members_page),
    "trainer": ("swarmnet train list", "--swarm lab/swarm.toml --data-dir watcher-of-jobs", page_of_a_job),
    "user": ("from openai import OpenAI", "", page_of_answers),
    "volunteer": ("swarmnet limits", "", page_of_the_kitchen),
}
"""Guides whose reader looks at the page of a swarm: a block after which to look, the options of the
dashboard, and the sight. Without options, the page is of the README's swarm."""


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_can_be_followed(guide: Path, lab_page: str, browser: Browser, pictures: Path) -> None:
    after, options, sight = SIGHTS.get(guide.stem, ("", "", None))
    walked, looked = [], sight is None
    with contextlib.closing(follow(guide)) as steps:
        for step in steps:
            walked.append(step)
            if sight is None or after not in step.typed:
                continue
            looked = True
            own = URL.findall(step.printed)
            with (
                showing(options) if options else contextlib.nullcontext(own[0] if own else lab_page) as url,
                looking(browser, reduced_motion="reduce") as page,
            ):
                path, shown = sight(url)
                show(page, url + path)
                for part, text in shown.items():
                    expect(page.locator(part)).to_contain_text(text)
                portray(page, pictures, guide.stem)
    assert looked, f"no block of {guide} has {after}"
    if walked:
        portray_terminal(browser, pictures, guide.stem, walked)


def test_nodes_compute_with_the_code_of_the_wheel(
    swarm: dict[str, str], installed: Path, newcomer: Path
) -> None:
    (folder,) = installed.glob(f"lib/python*/site-packages/{LIBRARIES}")
    ready = {library.name: library.read_bytes() for library in folder.iterdir()}
    used = {library.read_bytes() for library in newcomer.glob(".cache/swarmnet/native/*.so")}
    assert used <= set(ready.values())
    for source in SOURCES:  # nodes measure several targets of one, and use the fastest
        names = {native_code.library_name(source, target) for target in native_code.known_targets()}
        assert any(ready[name] in used for name in names), source


def test_a_node_is_stopped(swarm: dict[str, str]) -> None:
    assert "20:30 of 30" in shell(swarm["finish"])


@pytest.mark.net
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_commands_and_a_code_make_a_swarm_of_two_computers(
    installed: Path, newcomer: Path, browser: Browser, pictures: Path, tmp_path: Path
) -> None:
    """The commands of the guide, on two computers with empty homes. No file is copied."""
    start, join, ask = (
        block.text for block in blocks(ROOT / "docs" / "guides" / "home.md") if block.kind == "not run"
    )
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        one, two = stack.enter_context(lan(2))

        def typed(text: str, name: str, computer: Place) -> RunningCommand:
            """A command of the guide, with options for programs that read its output."""
            home = tmp_path / computer.ip
            home.mkdir(exist_ok=True)
            program = ("env", f"HOME={home}", "bash", "-c", f'exec {text.strip()} "$@"', "bash")
            log = tmp_path / f"{name}.log"
            return stack.enter_context(
                RunningCommand((), log, computer, stdin=subprocess.PIPE, program=program)
            )

        def type_code(code: str) -> None:
            assert joining.process.stdin is not None
            joining.process.stdin.write(f"{code[:3]} {code[3:]}\n")
            joining.process.stdin.flush()

        starting = typed(f"{start.strip()} --serve 0", "start", one)
        starting.wait("household", swarm="home")
        joining = typed(join, "join", two)
        joining.wait("asks_code", tries=None)
        code = starting.wait("code")["code"]
        type_code(f"{(int(code) + 1) % 10**6:06}")
        joining.wait("asks_code", tries=2)
        type_code(code)
        joining.wait("paired", swarm="home")
        paired_s = time.monotonic() - began
        starting.wait("ready")
        asking = typed(ask, "run", two)
        assert asking.wait_for_end() == 0, asking.log.read_text()
        answered_s = time.monotonic() - began
        assert "Paris" in asking.events[-1]["text"]
        starting.wait("endpoint")
        assert list((tmp_path / one.ip).rglob("endpoints/*.json")), "run would not find it"
        through_endpoint = typed(ask, "run-here", one)
        assert through_endpoint.wait_for_end() == 0, through_endpoint.log.read_text()
        assert "Paris" in through_endpoint.events[-1]["text"]
        joining.wait("ready")
        listing = typed("swarmnet swarm members home", "members", one)
        assert listing.wait_for_end() == 0, listing.log.read_text()
        ((member,),) = (event["members"] for event in listing.events)
        assert (member["roles"], bool(member["label"])) == (["client", "host"], True)
        showing = typed("swarmnet dashboard --swarm home --port 0", "dashboard", one)
        inside = tmp_path / "chromium"
        inside.write_text(f'#!/bin/sh\nexec {" ".join(one.prefix)} {CHROMIUM} "$@"\n')
        inside.chmod(0o755)
        with (
            browser.browser_type.launch(executable_path=inside, args=[*OPTIONS]) as here,
            looking(here, reduced_motion="reduce") as page,
        ):
            show(page, showing.wait("ready")["url"])
            expect(page.locator("#members li")).to_contain_text("member · client, host")
            expect(page.locator("dl.figures")).to_contain_text("Peers2")
            expect(page.locator("#peers .peer-name")).to_have_text([platform.node()] * 2)
            portray(page, pictures, "home")
        joining.kill()
        again = typed(join, "again", two)
        again.wait("ready")
        assert not [event for event in again.events if event["event"] == "asks_code"]
    print(f"paired after {paired_s:.1f} s, the first answer after {answered_s:.1f} s")
