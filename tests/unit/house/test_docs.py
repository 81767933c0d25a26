"""Documentation: every command in it is tested or marked as untested, and every link has a
target."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.bench.results import SECTIONS
from tests.support.house.doc_blocks import LOCAL_PORT, PORT, blocks
from tests.support.house.source_code import PACKAGES
from tests.support.processes.commands import every_command

ROOT = Path(__file__).parents[3]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = sorted(
    ROOT / page
    for page in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
)
KINDS = {"run", "background", "python", "not run"}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_command_of_a_guide_is_run_or_says_why_not(guide: Path) -> None:
    said = blocks(guide)
    assert len(said) == guide.read_text().count("```") // 2
    assert {block.kind for block in said} <= KINDS
    assert all(block.expected for block in said if block.kind == "not run")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_port_that_a_guide_asks_was_given_to_a_command_before(guide: Path) -> None:
    given: set[str] = set()
    for block in blocks(guide):
        given |= set(PORT.findall(block.text)) if block.kind == "background" else set()
        assert block.kind == "not run" or set(LOCAL_PORT.findall(block.text)) - {"0"} <= given


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in every_command() if len(name) == 1 and f"swarmnet {name[0]}" not in text] == []


def test_the_readme_of_the_decisions_lists_every_record() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(
        r"^\| \[(\d{4})\]\((.+?)\) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    titles = [(page.name, page.read_text().split("\n")[0]) for page in sorted(folder.glob("[0-9]*.md"))]
    assert [(name, f"# {number}: {title}") for number, name, title in listed] == titles


def test_the_json_of_every_command_is_documented() -> None:
    groups = {name[0] for name in every_command() if len(name) == 2}
    text = (ROOT / "docs" / "json.md").read_text()
    commands = [
        " ".join(name) for name in every_command() if (name and name[0] not in groups) or len(name) == 2
    ]
    # a file, not JSON
    assert [name for name in commands if f"`{name}`" not in text] == ["train template"]


def test_every_bench_has_results_and_make_runs_all_but_the_longest() -> None:
    started = {"generating_process", "light_peer", "requesting_process", "restless_node", "session_load"}
    modules = {module for module in (ROOT / "tests/bench").glob("*.py") if "__main__" in module.read_text()}
    benches = {bench for benches in SECTIONS.values() for bench in benches}
    assert {module.stem for module in modules} == benches | started | {"results"}
    run = set(re.findall(r"-m tests\.bench\.(\w+)", (ROOT / "Makefile").read_text()))
    assert benches - run == {"tune_task", *SECTIONS["Training"]}


MOST_WORDS = 1200
"""The words of a guide, which takes five minutes to read."""
MOST_RECORD_WORDS = 250
"""The words of a decision record: enough to argue, too few to narrate."""
MOST_COLUMNS = 100
"""The width of prose. Long lines hide long sentences."""


def test_guides_are_one_page() -> None:
    assert {guide.stem for guide in GUIDES} == {
        *("install", "upgrading", "home", "volunteer", "user", "private-group", "trainer", "operator"),
        *("agents", "batches"),
    }
    assert [guide.stem for guide in GUIDES if len(guide.read_text().split()) > MOST_WORDS] == []


def test_every_guide_begins_with_how_to_install() -> None:
    first = {guide.stem: guide.read_text().split("\n\n")[1] for guide in GUIDES}
    assert [name for name, text in first.items() if "(install.md)" not in text] == ["install"]


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The paths of all files of the project, from its root."""
    folders = (*PACKAGES.values(), ROOT / "tests")
    everything = (*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*")))
    return [f"/{path.relative_to(ROOT)}" for path in everything]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path, files: list[str]) -> None:
    """A path begins at the root, or is the end of one. In place of a package's own folder a page
    may have ``...``."""
    named = re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|c|js|css))`", page.read_text())
    packages = {"client": "swarmnet_client", "node": "swarmnet_node", "protocols": "swarmnet_protocols"}
    wanted = {path: path.replace("/.../", f"/{packages.get(path.partition('/')[0], '')}/") for path in named}
    assert [path for path, end in wanted.items() if not any(file.endswith(f"/{end}") for file in files)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    """Code, tables, headings, pictures and targets of links may be longer, and so may one word."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"<!--.*?-->|\]\([^)\s]+\)", "", prose, flags=re.DOTALL)
    lines = [line for line in prose.split("\n") if not line.lstrip().startswith(("|", "#", "<"))]
    assert [line for line in lines if len(line) > MOST_COLUMNS and " " in line.strip()] == []


@pytest.mark.parametrize(
    "record", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda path: path.stem
)
def test_a_decision_record_is_short(record: Path) -> None:
    """Figures and experiments are in ``tests/bench/reports``."""
    assert len(record.read_text().split()) <= MOST_RECORD_WORDS
