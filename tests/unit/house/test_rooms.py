"""The place of modules, and their imports: downwards only."""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.house.source_code import PACKAGES, ROOT, sources

LAYERS: Mapping[str, tuple[str, ...]] = {
    "swarmnet_protocols": (
        "errors",
        "timing",
        "arrays",
        "machine",
        "wire",
        "net",
        "reachability",
        "quantization",
        "fetching",
        "models",
        "membership",
        "routing",
        "directory",
        "joining",
        "session",
        "training",
    ),
    "swarmnet_node": ("owner", "engine", "hosting", "training", ""),
    "swarmnet_client": ("audit", "hosts", "chain", "model", "batching", "tuning", ""),
    "swarmnet": ("", "swarm_file", "web", "gateway", "dashboard", "doctor", "api", "cli", "__main__"),
}
"""The rooms of each package, lowest first. A module imports from its own room and from those before
it; "" is the package's own modules."""


def paths() -> dict[str, Path]:
    found = {}
    for package, path in sources():
        parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
        found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports anywhere, for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from [whole] if whole in known else [node.module] if node.module in known else []


@functools.cache
def graph() -> dict[str, set[str]]:
    known = paths()
    return {name: set(imported(path, known)) - {name} for name, path in known.items()}


def cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none: empty."""
    left = {name: set(targets) for name, targets in edges.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    while ends := [name for name in left if not any(name in targets for targets in left.values())]:
        for name in ends:
            del left[name]
    return sorted(left)


def room(module: str) -> str:
    package, _, rest = module.partition(".")
    if not rest:
        return LAYERS[package][-1]  # the package itself gives its public names
    return rest.partition(".")[0] if rest.partition(".")[0] in LAYERS[package] else ""


def test_no_module_imports_itself_through_others() -> None:
    assert cycle(graph()) == []


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_down(package: str) -> None:
    order = {name: number for number, name in enumerate(LAYERS[package])}
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if module.split(".")[0] == target.split(".")[0] == package
        and order[room(target)] > order[room(module)]
    ]
    assert wrong == []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert cycle({"a": {"b"}, "b": set()}) == []


SMALL = 3
"""A folder with more modules than this needs a README. The page of the folder above covers smaller
ones."""


@pytest.mark.parametrize(
    "room", sorted({path.parent for _, path in sources()}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_folder_of_several_modules_says_where_to_begin(room: Path) -> None:
    """The README of a package that has a folder of its own is next to the package."""
    modules = [path for _, path in sources() if path.parent == room and not path.stem.startswith("__")]
    stands_apart = room in PACKAGES.values() and room.parent != ROOT
    page = (room.parent if stands_apart else room) / "README.md"
    assert len(modules) <= SMALL or "**Begin**" in page.read_text() or "## Where to begin" in page.read_text()
