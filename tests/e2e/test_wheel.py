"""The wheel gives a working program on a machine that has no compiler, no git and no clone."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from swarmnet_protocols.machine import native_code

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("protocols/**/*.c"), *ROOT.glob("node/**/*.c")]
LIBRARIES = "swarmnet_protocols/machine/compiled"


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
    """A fresh virtual environment with the wheel. Its dependencies are those of this one."""
    place = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    pip = (sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"))
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile")
    subprocess.run([*pip, "install", *options, str(wheel)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(beside))
    return place


def type_there(installed: Path, home: Path, *arguments: str) -> str:
    """The output of a command, on a machine whose only programs are those of the environment."""
    done = subprocess.run(
        ["swarmnet", *arguments],
        cwd=home,
        env={"PATH": str(installed / "bin"), "HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_the_version_names_commit_and_kernels(installed: Path, tmp_path: Path) -> None:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    printed = type_there(installed, tmp_path, "--version")
    assert printed.startswith(f"swarmnet {version('swarmnet-p2p')}, commit {commit}")
    assert printed.endswith(f"kernels {native_code.targets()[0].name} from the wheel\n")


def test_the_demo_answers_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    events = [json.loads(line) for line in type_there(installed, tmp_path, "demo", "--json").splitlines()]
    (answer,) = [event for event in events if event["event"] == "answer"]
    assert "Paris" in answer["text"]
    (folder,) = installed.glob(f"lib/python*/site-packages/{LIBRARIES}")
    ready = {library.read_bytes() for library in folder.iterdir()}
    used = {library.read_bytes() for library in tmp_path.glob(".cache/swarmnet/native/*.so")}
    assert len(used) == len(SOURCES)
    assert used <= ready
