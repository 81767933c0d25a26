"""The table of modules in the README of each folder, made from the first paragraphs of their docstrings.

``python -m tests.support.room_tables`` writes the tables.
"""

import ast
from pathlib import Path

from tests.support.source_code import PACKAGES, ROOT, sources

SMALL = 3
"""A folder of at most this many modules needs no README: the one above names them."""
_HEADER = "| | |\n|---|---|\n"


def rooms() -> list[Path]:
    """Every folder of hand-written code."""
    return sorted({path.parent for _, path in sources()})


def page(room: Path) -> Path:
    """The README of a folder. A package in a folder of its own has it beside the package."""
    is_beside = room in PACKAGES.values() and room.parent != ROOT
    return (room.parent if is_beside else room) / "README.md"


def modules(room: Path) -> list[Path]:
    return [path for _, path in sources() if path.parent == room and not path.stem.startswith("__")]


def table(room: Path) -> str:
    """One row for each module and folder of ``room``."""
    rows = [f"| `{path.name}` | {_summary(path)} |\n" for path in modules(room)]
    for folder in (each for each in rooms() if each.parent == room):
        name = f"`{folder.name}/`"
        link = f"[{name}]({page(folder).relative_to(page(room).parent)})" if page(folder).exists() else name
        rows.append(f"| {link} | {_summary(folder / '__init__.py')} |\n")
    return _HEADER + "".join(rows)


def told(room: Path) -> str:
    """The table in the README of ``room``; empty without one."""
    _, header, rest = page(room).read_text().partition(_HEADER)
    rows = rest[: rest.find("\n\n") + 1] if "\n\n" in rest else rest
    return header + rows


def _summary(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return (
        " ".join(said.partition("\n\n")[0].split()).removesuffix(".").replace("``", "`").replace("|", "\\|")
    )


if __name__ == "__main__":
    for each in rooms():
        if page(each).exists():
            page(each).write_text(page(each).read_text().replace(told(each), table(each)))
