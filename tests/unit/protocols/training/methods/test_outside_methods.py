"""Methods from outside the package: which are refused, and that code of others is never run."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from swarmnet_node.training.job_store import LocalFiles
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.job_settings import Job, JobError
from swarmnet_protocols.training.jobs import open_job, seal_job
from swarmnet_protocols.training.methods import METHODS, code_of, get_method, outside
from swarmnet_protocols.training.methods.outside import load_file, try_method
from tests.defences import defence, nothing, replacing
from tests.support.house.doc_blocks import code_blocks
from tests.support.training.tiny_job import for_others, tiny_job
from tests.unit.protocols.training.test_training_jobs import _resigned

OWNER = Identity.from_seed(b"owner")
(EXAMPLE,) = [
    block for block in code_blocks(Path(__file__).parents[5] / "docs" / "training.md") if "METHOD" in block
]


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_loaded", {})


def written(folder: Path, source: str = EXAMPLE) -> Path:
    path = folder / "half_way.py"
    path.write_text(source)
    return path


def sealed_by_owner(folder: Path) -> bytes:
    """A published job that trains by the example."""
    load_file(written(folder))
    job = tiny_job(folder, method={"name": "half-way", "settings": {"sync_every": 5, "rate": 0.25}})
    return seal_job(for_others(job), OWNER)


def test_a_job_names_its_method_and_the_hash_of_the_file(tmp_path: Path) -> None:
    opened = open_job(sealed_by_owner(tmp_path)).job
    assert opened.method.code == code_of("half-way")
    assert opened.make_method().steps_per_round == 5
    with pytest.raises(JobError, match="no setting 'rte'"):
        tiny_job(tmp_path, method={"name": "half-way", "settings": {"rte": 1.0}}).check()
    with pytest.raises(JobError, match=r"rate = 2\.0"):
        tiny_job(tmp_path, method={"name": "half-way", "settings": {"rate": 2.0}}).check()


@defence(
    "other code than the job names is not run",
    off=replacing(outside, "checked_source", lambda path, code=None: path.read_bytes()),
)
def test_other_code_than_the_job_names_is_not_run(tmp_path: Path) -> None:
    job = open_job(sealed_by_owner(tmp_path)).job
    outside._loaded.clear()
    marker = tmp_path / "ran"
    files = LocalFiles(method=written(tmp_path, f"{EXAMPLE}\nopen({str(marker)!r}, 'w').close()\n"))
    for use in (files.load_method, files.applied_to):
        with pytest.raises(ConfigError, match="is other code than the job's"):
            use(job)
    assert not marker.exists()


def test_a_job_with_a_built_in_method_runs_no_file(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    files = LocalFiles(method=written(tmp_path, f"open({str(marker)!r}, 'w').close()\n{EXAMPLE}"))
    job = for_others(tiny_job(tmp_path))
    files.load_method(job)
    with pytest.raises(ConfigError, match="is part of swarmnet"):
        files.applied_to(job)
    assert not marker.exists()


def test_a_foreign_job_opens_without_its_code(tmp_path: Path) -> None:
    sealed = sealed_by_owner(tmp_path)
    outside._loaded.clear()
    opened = open_job(sealed)
    assert (opened.job.method.name, opened.job.job.name) == ("half-way", "tiny")
    assert not outside._loaded
    with pytest.raises(ConfigError, match="trains with code of its owner") as caught:
        LocalFiles(data=(tmp_path / "text.txt",)).applied_to(opened.job)
    assert str(opened.job.method.code) in caught.value.hint
    with pytest.raises(JobError, match="unknown method 'half-way' with the code"):
        opened.job.make_method()


def with_entry_point(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Install the example as the entry point half-way. Return a file that an import writes."""
    marker = folder / "imported"
    (folder / "lab_half_way.py").write_text(f"open({str(marker)!r}, 'w').close()\n{EXAMPLE}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "lab_half_way", raising=False)
    entry = EntryPoint("half-way", "lab_half_way", outside.GROUP)
    monkeypatch.setattr(outside, "entry_points", lambda group, name: [entry] if name == entry.name else [])
    return marker


def test_an_installed_method_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry_point(monkeypatch, tmp_path)
    job = for_others(tiny_job(tmp_path, method={"name": "half-way", "settings": {}}))
    assert job.method.code is not None
    outside._loaded.clear()
    opened = open_job(seal_job(job, OWNER)).job
    assert LocalFiles(data=(tmp_path / "text.txt",)).applied_to(opened).make_method().name == "half-way"


@defence(
    "other installed code than the job names is not run",
    off=replacing(outside, "checked_source", lambda path, code=None: path.read_bytes()),
)
def test_other_installed_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = open_job(sealed_by_owner(tmp_path)).job
    outside._loaded.clear()
    marker = with_entry_point(monkeypatch, tmp_path)
    for use in (LocalFiles(data=(tmp_path / "text.txt",)).applied_to, Job.make_method):
        with pytest.raises(ConfigError, match="is other code than the job's"):
            use(job)
    assert not marker.exists()


@defence("a stranger's job starts no installed package", off=replacing(Job, "check_published", nothing))
def test_a_strangers_job_starts_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = with_entry_point(monkeypatch, tmp_path)
    sealed = json.loads(seal_job(for_others(tiny_job(tmp_path)), OWNER))
    sealed["job"]["method"] = {"name": "half-way", "settings": {}, "code": None}
    with pytest.raises(JobError, match="unknown method"):
        open_job(_resigned(sealed))
    assert not marker.exists()


def test_a_built_in_name_with_code_is_refused(tmp_path: Path) -> None:
    sealed = json.loads(seal_job(for_others(tiny_job(tmp_path)), OWNER))
    sealed["job"]["method"]["code"] = "ab" * 32
    with pytest.raises((JobError, IntegrityError), match="unknown method 'diloco' with the code"):
        open_job(_resigned(sealed))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "zo"])
def test_every_built_in_method_passes_the_trial(name: str) -> None:
    try_method(name, lambda: get_method(name, {}))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("SETTINGS(Settings)", "SETTINGS", "has no SETTINGS"),
        ("class METHOD", "class Method", "has no METHOD"),
        ('name = "half-way"', 'name = "half way"', "has no METHOD"),
        ("import torch\n", "import torch\nraise SystemExit(0)\n", "SystemExit: 0"),
        ("import torch\n", "import torch\n(", "SyntaxError"),
    ],
    ids=["settings", "method", "name", "exits", "syntax"],
)
def test_a_file_without_a_method_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_file(written(tmp_path, EXAMPLE.replace(old, new)))
    assert not outside._loaded


STEP = "self._weights - self._rate * average.values"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (STEP, f"({STEP})[:-1]", r"apply\(1\) does not return 64"),
        (STEP, f"({STEP}) / 0", r"apply\(1\) does not return 64"),
        (STEP, f"({STEP}).double()", r"apply\(1\) does not return 64"),
        (STEP, f"{STEP} + torch.rand(64)", "other bits"),
        (STEP, f"{STEP} + 1 // 0", "ZeroDivisionError"),
        ('codec = "float32"', 'codec = "float32"\n    kind = "scalars"', "kind must be"),
        ('codec = "float32"', 'codec = "float32"\n    feedback_decay = 2', "feedback_decay from 0 to 1"),
        ("settings.sync_every", "0", "steps_per_round must be 1"),
        (
            "    def apply",
            "    def partners(self, round, roster, me): return (me, roster[0])\n    def apply",
            "partners must be",
        ),
        ("    def apply", "    def range(self, round): return 0, 99\n    def apply", r"range\(0\) is \(0, 99\)"),
        ("    def apply", "    def contribution(self, round, p): return p[:3]\n    def apply", "contribution"),
        ("    def apply", "    def restore(self, state): self._weights = self._weights * 0\n    def apply", "restore"),
    ],
    ids=[
        "short", "infinite", "float64", "random", "raises", "scalars", "decay", "no steps", "partners", "range",
        "contribution", "restore",
    ],
)  # fmt: skip
def test_a_method_that_breaks_a_rule_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in EXAMPLE
    load_file(written(tmp_path, EXAMPLE.replace(old, new)))
    with pytest.raises(ConfigError, match=said):
        get_method("half-way", {})


@defence("a method's file has one MiB at most", off=replacing(outside, "MAX_FILE_BYTES", 1 << 24))
def test_a_file_that_is_too_large_is_no_method(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_file(written(tmp_path, EXAMPLE + "#" * (1 << 20)))
