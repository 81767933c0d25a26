"""The fuzzer: its seeds are valid, random inputs are refused by the declared errors, and every
decoder has a target."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.targets import TARGETS, believe_signatures
from tests.support.attacks.mutations import mutated, taken
from tests.support.house.source_code import ROOT, sources

DECODER = re.compile(r"(open|read|decode|parse|unseal|unpack|merge)(_\w+)?|\w+_from_wire")
TAKES = {"bytes", "Buffer", "bytes | Buffer", "str | bytes", "Path"}
"""The first argument of a decoder, or the object that contains it."""


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_takes_its_seeds_and_refuses_what_is_nearly_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe_signatures(monkeypatch.setattr)
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    if name != "frames":  # it reads until the stream ends
        assert taken(seeds, target.read, target.refusals)
    for seed in seeds:
        assert len(seed) <= target.max_bytes
        taken(mutated(seed, 20), target.read, target.refusals)


def test_every_decoder_of_the_protocols_has_a_target() -> None:
    covered = {each for target in TARGETS.values() for each in target.covers}
    found = {
        f"{str(path.relative_to(ROOT / 'protocols' / 'swarmnet_protocols').with_suffix('')).replace('/', '.')}.{node.name}"
        for package, path in sources()
        if package == "swarmnet_protocols"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and DECODER.fullmatch(node.name)
        and node.args.args
        and ast.unparse(node.args.args[0].annotation or node) in TAKES
    }
    assert found - covered == set()
    assert all(
        (
            ROOT / "protocols" / "swarmnet_protocols" / f"{each.rpartition('.')[0].replace('.', '/')}.py"
        ).exists()
        for each in covered
    )
    assert len(found & covered) > 10


def test_a_decoder_that_fails_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fuzzer itself; ``planted`` fails on one byte."""
    # The fuzzer does so too, and only monkeypatch ends it after this test.
    believe_signatures(monkeypatch.setattr)
    assert main(["planted", "--seconds", "60", "--folder", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-2])
    with pytest.raises(ZeroDivisionError):
        main(["planted", "--input", found["failed"]])
