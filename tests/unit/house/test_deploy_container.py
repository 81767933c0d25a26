"""The Containerfile keeps the rules that keep an image small, pinned and harmless."""

import re
from collections.abc import Callable

import pytest

from tests.support.house.deployment import DEPLOY, ROOT, instructions

CONTAINERFILE = (DEPLOY / "Containerfile").read_text()


def defaults(text: str) -> dict[str, str]:
    return dict(
        each.partition("=")[::2] for word, each in instructions(text) if word == "ARG" and "=" in each
    )


def last_stage(text: str) -> list[tuple[str, str]]:
    every = instructions(text)
    starts = [number for number, (word, _) in enumerate(every) if word == "FROM"]
    return every[starts[-1] :]


def complaints(text: str) -> list[str]:
    """The errors in a Containerfile."""
    every, last = instructions(text), last_stage(text)
    found = []
    for word, rest in every:
        if word == "FROM":
            base = re.sub(r"\$\{(\w+)\}", lambda match: defaults(text).get(match[1], ""), rest.split()[0])
            if not re.search(r":[0-9]+\.[0-9]+\.[0-9]+", base):
                found.append("base without a version")
        if word == "ADD":
            found.append("ADD")
        if word == "RUN" and "pip install" in rest and "--constraint constraints.txt" not in rest:
            found.append("pip without constraints")
        if word == "RUN" and "apt-get install" in rest:
            if "--no-install-recommends" not in rest:
                found.append("apt with recommendations")
            if "rm -rf /var/lib/apt/lists" not in rest:
                found.append("apt lists stay")
        if word == "RUN" and re.search(r"\bsudo\b|curl[^|]*\|", rest):
            found.append("sudo or a script from the net")
        if word in {"ENTRYPOINT", "CMD"} and not rest.startswith("["):
            found.append("a shell in front of the program")
        if word in {"ENV", "ARG"} and re.search(r"(?i)password|secret|token|api_?key", rest):
            found.append("a secret")
    users = [rest for word, rest in last if word == "USER"]
    if not users or users[-1].partition(":")[0] in {"root", "0"} or not users[-1][0].isdigit():
        found.append("root, or a user that cannot be checked")
    if [word for word, _ in last].count("ENTRYPOINT") != 1 or not any(
        word == "HEALTHCHECK" for word, _ in last
    ):
        found.append("not one program with its health")
    if "PIP_NO_CACHE_DIR=1" not in text:
        found.append("pip's cache stays")
    return found


def test_the_containerfile_keeps_the_rules() -> None:
    assert complaints(CONTAINERFILE) == []


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (
            lambda text: text.replace("python:3.11.11-slim-bookworm", "python:latest"),
            "base without a version",
        ),
        (lambda text: text.replace("COPY dist dist", "ADD https://x.org/a.tar /src"), "ADD"),
        (lambda text: text.replace("--constraint constraints.txt ", "", 1), "pip without constraints"),
        (
            lambda text: text.replace("RUN useradd", "RUN apt-get install --yes gcc && useradd"),
            "apt with recommendations",
        ),
        (
            lambda text: text.replace("RUN useradd", "RUN apt-get install --yes gcc && useradd"),
            "apt lists stay",
        ),
        (
            lambda text: text.replace("RUN useradd", "RUN curl https://x.org | sh && useradd"),
            "sudo or a script from the net",
        ),
        (
            lambda text: text.replace('ENTRYPOINT ["swarmnet"]', "ENTRYPOINT swarmnet"),
            "a shell in front of the program",
        ),
        (lambda text: text.replace("HOME=/data", "API_KEY=x", 1), "a secret"),
        (lambda text: text.replace("USER 10001:10001", ""), "root, or a user that cannot be checked"),
        (
            lambda text: text.replace("USER 10001:10001", "USER root"),
            "root, or a user that cannot be checked",
        ),
        (lambda text: text.replace("HEALTHCHECK", "LABEL x=y"), "not one program with its health"),
        (lambda text: text.replace("PIP_NO_CACHE_DIR=1 ", ""), "pip's cache stays"),
    ],
)
def test_a_broken_rule_is_found(break_it: Callable[[str], str], complaint: str) -> None:
    broken = break_it(CONTAINERFILE)
    assert broken != CONTAINERFILE
    assert complaint in complaints(broken)


def test_copied_files_exist_and_are_not_ignored() -> None:
    """``make wheel`` makes ``dist``."""
    ignore = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    for word, rest in instructions(CONTAINERFILE):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() or f"--wheel-dir {source} ." in (
                    ROOT / "Makefile"
                ).read_text()
                assert f"!{source}" in ignore
    assert ignore[0] == "*"
