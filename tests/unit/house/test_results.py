"""RESULTS.md agrees with the stored measurements, and a bench's output is converted to measurements."""

from tests.bench.results import FOLDER, PAGE, SECTIONS, Headline, key, measure, page


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
