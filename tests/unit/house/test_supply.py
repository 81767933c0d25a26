"""No module runs data from a file or the network as code, or decompresses it without a limit."""

import ast
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.support.house.source_code import ROOT, dotted, imports, is_false, sources
from tests.support.plugins.audit.sitecustomize import EXIT_CODE

MODULES = {
    "pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop", "runpy",
    "zlib", "gzip", "bz2", "lzma", "zstandard", "tarfile", "zipfile", "yaml", "torch.hub",
}  # fmt: skip
"""Modules that may not be imported: they execute data that they read, or decompress it without a
limit."""
EXCEPT = {
    "protocols/swarmnet_protocols/machine/lean_imports.py": {
        "<computed>"
    },  # imports parts of a package by their names
    # Runs the file of a method that the user of this machine named on the command line.
    "protocols/swarmnet_protocols/training/methods/outside.py": {"exec", "compile"},
    # Reads the content as a stream, and stops where it grows out of proportion.
    "protocols/swarmnet_protocols/models/text/data_files.py": {"gzip", "zlib"},
    "protocols/swarmnet_protocols/models/__init__.py": {"<computed>"},  # imports modules of its table
    "swarmnet/cli/lazy.py": {"<computed>"},  # imports commands that cli/__init__.py lists
    "swarmnet/dashboard/feed.py": {"gzip"},  # compresses only
    "swarmnet/web/pages.py": {"gzip"},
}
CALLS = {
    "eval", "exec", "compile", "__import__",
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "torch.load", "torch.save", "torch.jit.load", "torch.export.load", "torch.package.PackageImporter",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "shutil.unpack_archive",
}  # fmt: skip
METHODS = {"extractall", "decompress", "decompressobj"}
ONLY_FALSE = {"trust_remote_code", "shell", "allow_pickle"}


def faults(tree: ast.AST, allowed: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    for line, module in imports(tree):
        known = {module, module.partition(".")[0]}
        if known & (MODULES | CALLS | {"<computed>"}) and not known.intersection(allowed):
            yield line, f"imports {module}"
    names = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = dotted(node.func).partition(".")
            name = names.get(first, first) + dot + rest
            is_call = name in CALLS and name not in allowed
            if is_call or (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
                yield node.lineno, f"calls {name}"
            for keyword in node.keywords:
                if keyword.arg in ONLY_FALSE and not is_false(keyword.value):
                    yield node.lineno, f"calls {name} with {keyword.arg}"
        elif isinstance(node, ast.Assert) and not _narrows_a_type(node.test):
            yield node.lineno, "asserts: python -O does not"


def _aliases(tree: ast.AST) -> dict[str, str]:
    """The names under which modules are imported."""
    return {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }


def _narrows_a_type(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


def test_no_module_runs_data_or_decompresses_without_a_limit() -> None:
    files = [path for _, path in sources()] + sorted((ROOT / "deploy").rglob("*.py"))
    found = [
        f"{name}:{line}: {what}"
        for path in files
        for name in [str(path.relative_to(ROOT))]
        for line, what in faults(ast.parse(path.read_text()), EXCEPT.get(name, ()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        *(f"import {module}" for module in sorted(MODULES)),
        "from pickle import loads",
        "from torch import load",
        "from yaml import safe_load",
        "from importlib import import_module\nimport_module('dill')",
        "import importlib\nimportlib.import_module(name)",
        *(f"{call}(text)" for call in sorted(CALLS)),
        "import torch as t\nt.load(path)",
        "import os as system\nsystem.popen(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "subprocess.run(text, shell=True)",
        "numpy.load(path, allow_pickle=True)",
        "decoder.decompress(data)",
        "archive.extractall(path)",
        "def f(size):\n    assert size > 0",
        "assert isinstance(size, int)",
    ],
)
def test_forbidden_code_is_found(code: str) -> None:
    assert list(faults(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "re.compile(pattern)",
        "model.eval()",
        "safetensors.torch.load_file(path)",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "subprocess.run(command, check=False)",
        "assert process.stdout is not None",
    ],
)
def test_allowed_code_is_not_found(code: str) -> None:
    assert list(faults(ast.parse(code))) == []


# ---- at run time -------------------------------------------------------------------------------

PLANTED = {
    "a pickle": "import pickle; pickle.loads(b'cos\\ngetpid\\n(tR.')",
    "a pickle of torch": (
        "import io, torch; file = io.BytesIO(); torch.save(torch.ones(1), file); file.seek(0);"
        "torch.load(file, weights_only=False)"
    ),
    "marshalled code": "import marshal; marshal.loads(marshal.dumps(1))",
    "text that is run": "import types; exec('1', vars(types.ModuleType('planted')))",
    "a shell": "import os; os.system('true')",
    "a shell by another name": "import subprocess; subprocess.run('true', shell=True)",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_test_process_that_runs_data_as_code_ends(planted: str) -> None:
    """Every test that runs real nodes thereby shows that they do not run data as code."""
    ended = subprocess.run(
        [sys.executable, "-c", PLANTED[planted]], capture_output=True, text=True, check=False
    )
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert ended.stderr.startswith("not allowed: ")


def test_a_test_that_unpickles_fails() -> None:
    with pytest.raises(RuntimeError, match="unpickles"):
        pickle.loads(pickle.dumps(Path))


def test_test_processes_run_with_the_audit_hook() -> None:
    watched = "import sys; print(sys.modules['sitecustomize'].__file__)"
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
