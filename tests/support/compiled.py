"""The C code of this machine, for tests of what it computes. They share what is compiled."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.machine import native_code

if TYPE_CHECKING:
    from swarmnet_node.engine.kernels.native_backend import NativeBackend
    from swarmnet_protocols.quantization.products import Products

ROOT = Path(__file__).parents[2]
SHARED = ROOT / ".pytest_cache" / "native"
"""The libraries of the product's code that tests have compiled."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, for which other processes wait. On Windows nobody waits, and some code
    is compiled twice."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def sharing_libraries() -> Iterator[None]:
    """Copy the libraries of this process from ``SHARED``, and first compile what is missing there.

    The code of a single test is compiled where the test wants it.
    """
    real = native_code._built

    def built(
        source: Path, headers: Sequence[Path], folder: Path, compiler: str, target: native_code.Target
    ) -> Path:
        if not source.is_relative_to(ROOT):
            return real(source, headers, folder, compiler, target)
        # Processes of pytest-xdist begin at once. One compiles, and the others wait for it.
        with locked(SHARED / f"{source.stem}.{target.name}.lock"):
            library = real(source, headers, SHARED, compiler, target)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / library.name).exists():
            shutil.copyfile(library, folder / library.name)
        return real(source, headers, folder, compiler, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_code, "_built", built)
        yield


def lend_libraries(cache_dir: Path) -> None:
    """Let a process with this cache folder load the libraries in ``SHARED``.

    A process with an empty folder compiles for ten seconds of a core, and many tests have a folder
    of their own. The folder of the user gets copies of what the process would compile there. Any
    other folder is linked, so that later processes load what this one compiles.
    """
    native = cache_dir / "native"
    SHARED.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache_dir != default_cache_dir():
        if not native.exists():
            cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            native.symlink_to(SHARED)
        return
    native.mkdir(mode=0o700, parents=True, exist_ok=True)
    for library in SHARED.glob("*.so"):
        if not (native / library.name).exists():
            # A process that starts meanwhile would find part of a library, and compile it.
            whole = shutil.copyfile(library, native / f"copy-{os.getpid()}")
            whole.replace(native / library.name)


def compiled_backend(target: str | None = None, cache_dir: Path | None = None) -> "NativeBackend":
    """Return the backend in C, as ``NativeBackend.load``.

    On Linux the test fails without it. Elsewhere PyTorch has another OpenMP library, which the C
    code does not use: the test is skipped.
    """
    from swarmnet_node.engine.kernels.native_backend import NativeBackend

    found = NativeBackend.load(cache_dir or default_cache_dir(), target)
    if found is None and sys.platform != "linux":
        pytest.skip("PyTorch has no libgomp here")
    assert found is not None, "the C code does not compile, or fails its trial"
    return found


def compiled_products(target: str | None = None) -> "Products":
    """Return the products in C, or skip the test, as ``compiled_backend``."""
    from swarmnet_protocols.quantization.products import load_products

    compiled_backend(target)
    return load_products(default_cache_dir(), target)
