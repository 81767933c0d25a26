"""Words that the glossary has replaced do not return, in code, tests or pages."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.source_code import ROOT, sources

RETIRED = {
    "anybody": "client, host, peer, worker, owner",
    "crowd": "subnet",
    "door": "handshake",
    "everybody": "all peers, all workers",
    "gatherer": "leader",
    "gathering": "matchmaking",
    "heir": "residual",
    "keepers": "replicas",
    "lane": "sequence",
    "lanes": "sequences",
    "mender": "chain supervisor",
    "mending": "recovery",
    "nobody": "no client, no host, no peer",
    "patience": "timeout, retry policy",
    "somebody": "a client, a host, a peer",
    "squeezed": "unpadded",
    "whoever": "the client, the host, the peer that",
    "whomever": "the peer that",
}
"""The retired words, each with its replacement."""

PAGES = (
    "tests/**/*.py",
    "tests/**/*.md",
    "*.md",
    "docs/**/*.md",
    "*/README.md",
    "swarmnet/**/*.md",
    "node/**/*.md",
    "client/**/*.md",
    "protocols/**/*.md",
    "deploy/**/*.md",
    "deploy/swarms/*",
    "deploy/systemd/*",
    "deploy/prometheus/*",
    "proto/*",
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words(text: str) -> Iterator[str]:
    """Each word of prose or of an identifier, in lower case."""
    return (word.lower() for word in _WORD.findall(text))


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Every word of a file with its line; of Python: identifiers, strings and comments."""
    if path.suffix != ".py":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield from ((number, word) for word in words(line))
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            yield from ((token.start[0], word) for word in words(token.string))


def files() -> list[Path]:
    pages = {page for kind in PAGES for page in ROOT.glob(kind) if ".venv" not in page.parts}
    found = {path for _, path in sources()} | {page for page in pages if page.is_file()}
    return sorted(found - {Path(__file__)})


def test_no_retired_word_returns() -> None:
    found = [
        f"{path.relative_to(ROOT)}, line {line}: {word!r}; say: {RETIRED[word]}"
        for path in files()
        for line, word in said(path)
        if word in RETIRED
    ]
    assert found == []


def test_a_retired_word_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text('class LaneGroup:\n    """Whoever waits."""\n')
    assert [word for _, word in said(page) if word in RETIRED] == ["lane", "whoever"]
