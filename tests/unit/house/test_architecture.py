"""The rules of the house that a reader cannot see in any one file."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.house.source_code import PACKAGES, ROOT, dotted, imports, sources

MAY_IMPORT = {
    "swarmnet": {"swarmnet", "swarmnet_node", "swarmnet_client", "swarmnet_protocols"},
    "swarmnet_node": {"swarmnet_node", "swarmnet_protocols"},
    "swarmnet_client": {"swarmnet_client", "swarmnet_protocols"},
    "swarmnet_protocols": {"swarmnet_protocols"},
}


def violations(package: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, module in imports(tree):
        top = module.partition(".")[0]
        if top in PACKAGES and top not in MAY_IMPORT[package]:
            yield line, f"{package} imports {module}"
    handed_on = {
        id(node.left) for node in ast.walk(tree) if isinstance(node, ast.BinOp)
    }  # env=os.environ | {...}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import"
        elif isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.lineno, "defines __del__"
        elif (
            dotted(node) in {"os.environ", "os.getenv"}
            and package != "swarmnet"
            and id(node) not in handed_on
        ):
            yield node.lineno, "reads the environment"


def test_every_module_keeps_the_rules() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for package, path in sources()
        for line, what in violations(package, ast.parse(path.read_text()))
    ]
    assert found == []


def test_text_reaches_the_terminal_through_one_module() -> None:
    """The module removes control sequences."""
    printing = {"typer.echo", "typer.secho", "sys.stdout.write", "print"}
    cli = [path for _, path in sources() if "cli" in path.parts and path.name != "output.py"]
    assert cli
    assert not [
        f"{path.name}:{node.lineno}"
        for path in cli
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and dotted(node.func) in printing
    ]


def test_public_classes_have_names_of_their_own() -> None:
    """One name for one thing: a reader who searches for a class finds one."""
    modules: dict[str, list[str]] = {}
    for _, path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_unit_tests_are_in_the_folders_of_their_code() -> None:
    assert list((ROOT / "tests" / "unit").glob("test_*.py")) == []


def test_deploy_has_no_code_of_ours() -> None:
    texts = [path.read_text() for path in (ROOT / "deploy").rglob("*.py")]
    assert not [
        module for text in texts for _, module in imports(ast.parse(text)) if module.startswith("swarmnet")
    ]


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("swarmnet_node", "import swarmnet_client"),
        ("swarmnet_client", "def f():\n    from swarmnet_node.engine.engine import Engine"),
        ("swarmnet_protocols", "import swarmnet.cli"),
        ("swarmnet_protocols", "from importlib import import_module\nimport_module('swarmnet_node')"),
        ("swarmnet", "from . import cli"),
        ("swarmnet_node", "import os\nos.environ['HOME']"),
        ("swarmnet_node", "class C:\n    def __del__(self): pass"),
    ],
)
def test_forbidden_names_are_found(package: str, code: str) -> None:
    assert list(violations(package, ast.parse(code)))


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("swarmnet", "import swarmnet_node.owner.control"),
        ("swarmnet_client", "import swarmnet_protocols.errors"),
        ("swarmnet_node", "import os\nspawn(env=os.environ | {'A': 'B'})"),
        ("swarmnet", "import os\nos.environ.setdefault('A', 'B')"),
    ],
)
def test_allowed_names_are_not_reported(package: str, code: str) -> None:
    assert list(violations(package, ast.parse(code))) == []
