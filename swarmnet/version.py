"""The version of swarmnet, its commit, and the compiled code that it uses here."""

import subprocess
from importlib.metadata import version
from pathlib import Path

_IN_WHEEL = Path(__file__).with_name("commit.txt")
_ROOT = Path(__file__).parents[1]


def describe() -> str:
    """Return version, commit and compiled code in one line."""
    from swarmnet_protocols.machine import native_code

    provider = native_code.provider()
    made = "from the wheel" if provider == "wheel" else f"compiled with {provider}"
    kernels = f"{native_code.targets()[0].name} {made}" if provider else "none: torch computes everything"
    return f"swarmnet {version('swarmnet-p2p')}, commit {commit()}, kernels {kernels}"


def commit() -> str:
    """Return the commit of the wheel or of the clone, or ``unknown``."""
    if _IN_WHEEL.is_file():
        return _IN_WHEEL.read_text()
    if not (_ROOT / ".git").exists():
        return "unknown"
    asked = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
