"""RESULTS.md agrees with the stored measurements, and a bench's output is converted to
measurements."""

from tests.bench.results import FOLDER, PAGE, SECTIONS, Headline, key, measure, page, without_path


def test_the_page_is_written_from_the_kept_measurements() -> None:
    """``python -m tests.bench.results write``."""
    assert PAGE.read_text() == page()


def test_every_kept_file_is_of_a_bench_on_the_page() -> None:
    benches = {bench for benches in SECTIONS.values() for bench in benches}
    assert {path.stem for path in FOLDER.glob("*.json")} <= benches


def test_samples_are_found_in_what_a_bench_prints() -> None:
    reports = [
        {"fault": "kill", "stalls_s": [0.2, 0.1, 0.4]},
        {"fault": "stop", "stalls_s": [2.0]},
        {"growth": [1.0, 2.0]},
    ]
    stalls = measure(Headline("stall", "s", "1", key("stalls_s", fault="kill")), reports)
    assert stalls is not None
    assert (stalls.n, stalls.median, stalls.p95) == (3, 0.2, 0.4)
    growth = measure(Headline("growth", "MiB", "", key("growth", 1)), reports)
    assert growth is not None
    assert (growth.n, growth.median, growth.p95) == (1, 2.0, None)
    assert measure(Headline("none", "", "", key("missing")), reports) is None


def test_recorded_commands_have_no_path_of_a_machine() -> None:
    given = ["--rounds", "5", "--llama-cpp", "/opt/llama/bin", "--out=~/runs", "org/name"]
    kept = [without_path(option) for option in given]
    assert kept == ["--rounds", "5", "--llama-cpp", "PATH", "--out=PATH", "org/name"]
    assert [
        path.name
        for path in FOLDER.glob("*.json")
        if '"command": ' in path.read_text() and " /" in path.read_text()
    ] == []
