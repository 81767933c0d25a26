"""What commands print for people."""

import pytest

from swarmnet.cli.output import print_table


def test_a_long_value_stays_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that was folded could not be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    address = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
    print_table("a node", {"name": "kitchen [1]", "addresses": f"{address}\n{address}"})
    assert capsys.readouterr().out.splitlines() == [
        "a node",
        "name       kitchen [1]",
        f"addresses  {address}",
        f"           {address}",
    ]
