"""Build the wheel with two more things in it: compiled C code, and the commit.

The C code is compiled for each target of this kind of machine, so whoever installs the wheel needs
no compiler. An editable installation gets neither: ``native_code`` compiles on first use.
"""

import os
import platform
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED, COMMIT = "swarmnet_protocols/machine/compiled", "swarmnet/commit.txt"
OLDEST_GLIBC = 17
"""The oldest glibc 2.x that pip knows as a manylinux policy for all kinds of machines."""


class CompiledCode(BuildHookInterface[Any]):
    """Hatchling's ``custom`` build hook of this project."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        scratch = self._scratch = Path(tempfile.mkdtemp(prefix="swarmnet-wheel-"))
        sys.path[:0] = [self.root, f"{self.root}/protocols"]
        from swarmnet.version import commit

        (scratch / "commit.txt").write_text(commit())
        build_data["force_include"][str(scratch / "commit.txt")] = COMMIT
        if sys.platform != "linux":  # elsewhere torch computes everything
            return
        libraries = compile_all(Path(self.root), scratch)
        build_data["force_include"] |= {str(each): f"{COMPILED}/{each.name}" for each in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{glibc(libraries)}_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._scratch)


def compile_all(root: Path, folder: Path) -> list[Path]:
    """Compile every C file for every target into ``folder``, and return the libraries."""
    from swarmnet_protocols.machine.native_code import compile_library, known_targets, library_name

    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("a wheel of swarmnet is built with a C compiler (Debian: apt install gcc)")
    headers = sorted(root.glob("protocols/swarmnet_protocols/**/*.h"))
    made = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source in sorted([*root.glob("protocols/**/*.c"), *root.glob("node/**/*.c")]):
            for target in known_targets():
                library = folder / library_name(source, target)
                work = pool.submit(
                    compile_library, source, library, target, headers=headers, compiler=compiler
                )
                made.append((library, work))
        for _, work in made:
            work.result()
    return [library for library, _ in made]


def glibc(libraries: list[Path]) -> int:
    """Return x of the oldest glibc 2.x that has all symbols of these libraries."""
    versions = [re.findall(rb"GLIBC_2\.(\d+)", each.read_bytes()) for each in libraries]
    return max(OLDEST_GLIBC, *(int(x) for found in versions for x in found))
