"""The source code of the project as data: its imports, calls and assertions."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "swarmnet": ROOT / "swarmnet",
    "swarmnet_node": ROOT / "node" / "swarmnet_node",
    "swarmnet_client": ROOT / "client" / "swarmnet_client",
    "swarmnet_protocols": ROOT / "protocols" / "swarmnet_protocols",
}


def sources() -> Iterator[tuple[str, Path]]:
    """Every hand-written module of the four packages, with its package."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield package, path


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every import in the module, at the top or inside a function, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            yield node.lineno, name.value if isinstance(name, ast.Constant) else "<computed>"


def dotted(node: ast.AST) -> str:
    """The text ``a.b.c`` of an expression of attributes; for another expression, the attributes at
    its end."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
