"""Results of benches: recorded as JSON in ``tests/bench/results``, shown in ``RESULTS.md``.

    python -m tests.bench.results record decode [options of the bench]   # run it and keep its figures
    python -m tests.bench.results write                                   # write RESULTS.md from what is kept

One file for each bench and one line for each measurement: the latest run replaces the one before.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "RESULTS.md"
ROOT = Path(__file__).parents[2]

Report = Mapping[str, Any]
"""One JSON object that a bench prints."""


@dataclass(frozen=True)
class Measurement:
    """Figures of one quantity. ``p95`` is None for fewer than two samples; ``goal`` is for
    people."""

    measured: str
    unit: str
    n: int
    median: float
    p95: float | None
    goal: str


@dataclass(frozen=True)
class Headline:
    """A quantity that a bench reports: where its samples are in what the bench prints."""

    measured: str
    unit: str
    goal: str
    samples: Callable[[Sequence[Report]], Sequence[float]]


def key(name: str, index: int | None = None, **where: Any) -> Callable[[Sequence[Report]], Sequence[float]]:
    """The values of ``name`` in the reports that have all of ``where``; of a list all its items, or
    the one at ``index``."""

    def samples(reports: Sequence[Report]) -> Sequence[float]:
        found: list[float] = []
        for report in reports:
            if name in report and all(report.get(field) == value for field, value in where.items()):
                value = report[name]
                if isinstance(value, list):
                    found += value if index is None else [value[index]]
                else:
                    found.append(value)
        return found

    return samples


DEFAULT_MODEL = "smollm2-135m-instruct"
BILLION_FORMATS = ("Q4_1", "Q4_K", "Q8_0")
"""Formats of the random model with the structure of Llama 3.2 1B that ``decode`` measures."""
SECTIONS: Mapping[str, Mapping[str, Sequence[Headline]]] = {
    "Answering": {
        "decode": [
            *(
                headline
                for format in BILLION_FORMATS
                for headline in (
                    Headline(
                        f"a billion weights in {format}: decode steps through three loopback hops",
                        "x llama.cpp's RPC",
                        "at least 1.8",
                        key("swarm_decode_over_llama_cpp_rpc", model=format),
                    ),
                    Headline(
                        f"{format}: these decode steps beside one process",
                        "x llama.cpp",
                        "at least 0.85",
                        key("swarm_decode_over_llama_cpp", model=format),
                    ),
                    Headline(
                        f"{format}: decode steps of one host with all blocks",
                        "x llama.cpp",
                        "at least 0.95",
                        key("one_host_decode_over_llama_cpp", model=format),
                    ),
                    Headline(
                        f"{format}: a prompt of 512 tokens through three loopback hops",
                        "x llama.cpp's RPC",
                        "at least 2",
                        key("swarm_prompt_over_llama_cpp_rpc", model=format),
                    ),
                    Headline(
                        f"{format}: that prompt beside one process",
                        "x transformers in float32",
                        "at least 1.2",
                        key("swarm_prompt_over_local", model=format),
                    ),
                    Headline(f"{format}: its decode", "tokens/s", "", key("swarm_decode", model=format)),
                    Headline(
                        f"{format}: memory of a host of five of 16 blocks, p2pd included",
                        "MiB",
                        "at most 350" if format == "Q4_1" else "",
                        key("swarm_mib", model=format),
                    ),
                    Headline(
                        f"{format}: until that host is ready",
                        "s",
                        "at most 2",
                        key("swarm_ready_s", model=format),
                    ),
                )
            ),
            Headline(
                "one stream through three loopback hops",
                "x one process",
                "at least 0.85",
                key("ratio_by_round", model=DEFAULT_MODEL),
            ),
            Headline("its rate", "tokens/s", "", key("swarm_tokens_per_s", model=DEFAULT_MODEL)),
            Headline(
                "its decode steps",
                "x llama.cpp's RPC",
                "at least 2",
                key("swarm_decode_over_llama_cpp_rpc", model=DEFAULT_MODEL),
            ),
            Headline(
                "its decode steps beside one process",
                "x llama.cpp",
                "at least 0.6",
                key("swarm_decode_over_llama_cpp", model=DEFAULT_MODEL),
            ),
            Headline(
                "a prompt of 512 tokens through three loopback hops",
                "x llama.cpp's RPC",
                "at least 1.5",
                key("swarm_prompt_over_llama_cpp_rpc", model=DEFAULT_MODEL),
            ),
        ],
        "exactness": [
            Headline(
                "prompts whose 64 greedy tokens equal those of one process, of 20",
                "",
                "at least 20",
                key("single_equal"),
            ),
            Headline("the same in left-padded batches", "", "at least 20", key("batched_equal")),
        ],
        "wire_exactness": [
            Headline(
                "prompts whose 64 greedy tokens stay the same with `--wire int8`",
                "%",
                "at least 95",
                key("equal_percent", wire="int8"),
            ),
            Headline("with bfloat16", "%", "", key("equal_percent", wire="bfloat16")),
        ],
        "long_inputs": [
            Headline(
                "a forward of 8 x 128 tokens through three loopback hops",
                "x one process",
                "at least 0.95",
                key("seconds_ratios", kind="rows"),
            ),
            Headline(
                "its processor time, 8 x 128 tokens",
                "x one process",
                "at least 0.95",
                key("cpu_ratios", kind="rows"),
            ),
            Headline(
                "a prompt of 2,048 tokens through three loopback hops",
                "x one process",
                "at least 0.95",
                key("seconds_ratios", kind="prompt"),
            ),
            Headline(
                "its processor time, 2,048 tokens",
                "x one process",
                "at least 0.95",
                key("cpu_ratios", kind="prompt"),
            ),
            Headline(
                "decoding of a text without repetition, with drafts",
                "x without",
                "at least 0.97",
                key("seconds_ratios", kind="decode"),
            ),
            Headline(
                "processor time with drafts", "x without", "at least 0.97", key("cpu_ratios", kind="decode")
            ),
        ],
        "concurrency": [
            Headline("eight clients together", "x one client", "at least 2.5", key("ratio")),
            Headline("their rate", "tokens/s", "", key("together_tokens_per_s")),
        ],
        "failover": [
            Headline(
                "stall when a host is killed, replay of 0.28 s included",
                "s",
                "at most 0.8",
                key("stalls_s", fault="kill"),
            ),
            Headline(
                "stall when a host is stopped (SIGSTOP)", "s", "at most 3.3", key("stalls_s", fault="stop")
            ),
            Headline("stall when a link is cut", "s", "at most 3.3", key("stalls_s", fault="cut")),
        ],
        "handover": [
            Headline(
                "failed or wrong answers while hosts finish", "", "0", key("bad_answers", what="finish")
            ),
            Headline(
                "longest stall beyond two steps when a host finishes",
                "s",
                "at most 0.2",
                key("beyond_s", what="finish"),
            ),
            Headline("the same while none does", "s", "", key("undisturbed_beyond_s", what="finish")),
            Headline("failed or wrong answers while a host moves", "", "0", key("bad_answers", what="move")),
            Headline(
                "longest stall beyond two steps when a host moves",
                "s",
                "at most 0.2",
                key("beyond_s", what="move"),
            ),
            Headline("the same while none does", "s", "", key("undisturbed_beyond_s", what="move")),
        ],
        "chaos": [
            Headline(
                "answers that completed while nodes failed", "share", "at least 0.995", key("completed_share")
            ),
            Headline("wrong answers meanwhile", "", "0", key("wrong_answers")),
            Headline("99th percentile of the longest stall", "s", "at most 3", key("stall_s_p99")),
        ],
        "wan_decode": [
            Headline("three hops, 50 ms round trip", "tokens/s", "", key("rounds", rtt_ms=50)),
            Headline("three hops, 100 ms round trip", "tokens/s", "", key("rounds", rtt_ms=100)),
        ],
        "wan_prompt": [
            Headline(
                "first token of 2,048, 20 Mbit/s, int8",
                "of float32",
                "at most 0.35",
                key("int8_of_float32", positions=2048),
            ),
            Headline("failovers of prompts of 2,048 at 2 Mbit/s", "", "0", key("failovers", rate_mbit=2.0)),
        ],
        "nat": [
            Headline("first answer of any pair of routers", "s", "at most 15", key("first_s")),
            Headline("pairs of routers with a direct link, of 16", "", "at least 11", key("direct_pairs")),
            Headline("answers that failed, of all", "", "0", key("failed_answers")),
            Headline("a hole is punched", "s", "", key("punch_s")),
            Headline("stall when a relay is killed", "s", "at most 5", key("s", fault="relay")),
            Headline(
                "answer after two routers lost their tables", "s", "at most 30", key("s", fault="mappings")
            ),
            Headline(
                "answer after a router got another address", "s", "at most 30", key("s", fault="address")
            ),
            Headline("answers that failed in five minutes", "", "0", key("steady_failures")),
            Headline("reservation of one of twenty hosts", "s", "at most 10", key("reserved_s")),
        ],
        "transports": [],
        "adapters": [],
        "steps": [],
        "head": [],
        "products": [
            *(
                headline
                for format in BILLION_FORMATS
                for headline in (
                    Headline(
                        f"one row times a matrix of 16 MiB as float32, packed as {format}",
                        "x rate of reading memory",
                        "at least 0.85",
                        key("row_over_read", format=format),
                    ),
                    Headline(
                        f"{format}: four rows",
                        "x time of one",
                        "at most 1.4",
                        key("four_rows_over_one", format=format),
                    ),
                )
            ),
            Headline(
                "one row times a 2048 x 2048 matrix, packed as Q4_1",
                "x float32",
                "",
                lambda reports: [
                    report["rows_1"]["packed_ms"] / report["rows_1"]["float32_ms"]
                    for report in reports
                    if report["format"] == "Q4_1"
                ],
            ),
        ],
        "speculation": [
            Headline(
                "edited code with speculation",
                "tokens a trip",
                "at least 2.5",
                key("tokens_per_trip", kind="edit code"),
            ),
            Headline(
                "summaries with speculation",
                "tokens a trip",
                "at least 2.5",
                key("tokens_per_trip", kind="summarise"),
            ),
            Headline(
                "chat with speculation", "tokens a trip", "at least 1.3", key("tokens_per_trip", kind="chat")
            ),
        ],
        "fairness": [
            Headline(
                "request beside a client with ten times its share, 95th percentile",
                "x beside an equal",
                "below 1.3",
                key("p95_ratio"),
            ),
            Headline(
                "first token of a short request among eight prompts of 2,000",
                "x alone",
                "at most 2",
                key("first_ratio"),
            ),
        ],
        "prefix_reuse": [
            Headline(
                "first token with a common prompt of 1,000 tokens, after the first session's",
                "x without reuse",
                "at most 0.2",
                key("ratio"),
            ),
        ],
        "perplexity": [
            Headline(
                "perplexity of the default model in bfloat16", "", "", key("perplexity", precision="bf16")
            ),
            Headline(
                "perplexity of blocks quantised at load to 8 bits",
                "% above bfloat16",
                "at most 1",
                key("percent", precision="int8"),
            ),
            Headline("the same with int4", "% above bfloat16", "at most 4", key("percent", precision="int4")),
            Headline("bits of a weight of int4", "bits", "", key("bits", precision="int4")),
        ],
        "fetching": [
            Headline("fetching weights from the hub", "x bound", "", key("ratio", case="the hub")),
            Headline("from two peers of the same rate", "x bound", "", key("ratio", case="two peers")),
            Headline("from the hub and two peers", "x bound", "", key("ratio", case="the hub and two peers")),
        ],
        "experts": [
            Headline(
                "decode with all experts on three peers, loopback",
                "x one node with all",
                "at least 0.6",
                key("over_one_node"),
            ),
            Headline("eight clients of it", "x one", "at least 2", key("clients_over_one", clients=8)),
            Headline("a token more on a local network of 1 ms one way", "ms", "at most 21.8", key("more_ms")),
            Headline(
                "decode with a quarter of the experts in memory",
                "x all in memory",
                "at least 0.5",
                key("some_over_all", in_memory=0.25),
            ),
        ],
        "expert_failover": [
            Headline(
                "longest stall when a peer with experts is killed, loopback",
                "s",
                "at most 0.5",
                key("stalls_s", fault="kill"),
            ),
            Headline("when it is slow", "s", "at most 0.5", key("stalls_s", fault="slow")),
            Headline("when it is stopped", "s", "at most 3", key("stalls_s", fault="stop")),
            Headline("when it is cut off, 1 ms", "s", "at most 3", key("stalls_s", fault="cut")),
            Headline("when no other peer has its experts", "s", "", key("stalls_s", fault="lost")),
        ],
        "gpu": [
            Headline(
                "one stream on a GPU",
                "x transformers with a static cache",
                "at least 1.0",
                key("one_stream_over_transformers", part="speed"),
            ),
            Headline("32 streams on a GPU", "x one", "at least 8", key("32_streams_over_one", part="speed")),
            Headline("GPU memory that a pause returns", "", "at least 0.95", key("freed", part="memory")),
            Headline(
                "a training worker in bfloat16 on a GPU",
                "x float32",
                "",
                lambda reports: [
                    ways["bfloat16"]["tokens_per_s"] / ways["float32"]["tokens_per_s"]
                    for report in reports
                    if (ways := report.get("ways"))
                ],
            ),
            Headline(
                "its memory in float32 for weights, gradients and optimizer states",
                "bytes a parameter",
                "at most 24",
                lambda reports: [
                    report["ways"]["float32"]["peak_bytes_per_parameter"]
                    for report in reports
                    if "ways" in report
                ],
            ),
        ],
        "frame_cost": [
            Headline("what the resource account adds to a message", "us", "", key("difference_us")),
        ],
        "directory": [
            Headline(
                "what a client reads of the hosts of a model, of 10,000, at each refresh",
                "kB",
                "at most 64",
                lambda reports: [
                    report["hosts"]["10000"]["refresh"]["bytes"] / 1000
                    for report in reports
                    if "10000" in report["hosts"]
                ],
            ),
        ],
        "help_times": [
            Headline(
                "`--help` of the slowest command",
                "ms",
                "at most 300",
                lambda reports: [
                    max(row["clock_ms"] for row in report["commands"].values()) for report in reports
                ],
            ),
        ],
    },
    "Fine-tuning": {
        "tuning": [
            Headline(
                "forward and backward of 8 x 128 tokens through three hops",
                "x one process",
                "at least 0.95",
                key("ratio_by_round", model=DEFAULT_MODEL),
            ),
            Headline(
                "a billion weights in Q4_K: forward and backward of 8 x 128 tokens through three hops",
                "x one process",
                "at least 0.95",
                key("ratio_by_round", model="Q4_K"),
            ),
        ],
        "tune_task": [
            Headline(
                "held-out loss after LoRA through a swarm whose hosts are killed",
                "x one process",
                "at most 1.01",
                key("loss_ratio"),
            ),
        ],
    },
    "A node": {
        "weight_memory": [
            Headline(
                "memory for the weights of all blocks of the default model",
                "x their bytes in the file",
                "at most 1.15",
                key("ratio"),
            ),
        ],
        "node": [],
        "limits": [
            Headline(
                "most of the up limit of 4 Mbit/s in 10 s",
                "x limit",
                "at most 1.05",
                key("most_of_limit", part="up"),
            ),
            Headline(
                "most of the down limit in 10 s", "x limit", "at most 1.05", key("most_of_limit", part="down")
            ),
            Headline("most of the memory limit", "x limit", "at most 1", key("most_of_limit", part="ram")),
            Headline("memory given back after a pause", "s", "at most 5", key("freed_s", part="pause")),
        ],
    },
    "Gateway and dashboard": {
        "batch": [
            Headline(
                "a thousand prompts by `batch`",
                "x the rate of 16 threads",
                "at least 0.9",
                key("throughput_ratio"),
            ),
            Headline(
                "p95 of the times from token to token of a caller next to a batch",
                "x alone",
                "at most 1.3",
                key("p95_ratio"),
            ),
        ],
        "router": [
            Headline("winners that a router of two models names", "share", "", key("accuracy")),
            Headline("by always naming the usual winner", "share", "", key("baseline")),
            Headline("log probability of a token: always the model for code", "", "", key("code_score")),
            Headline("always the model for prose", "", "", key("prose_score")),
            Headline("the router at its best price", "", "above both", key("router_score")),
            Headline("its cost", "x the slower model", "at most 1", key("router_cost")),
            Headline("random choice at that cost", "", "", key("random_score")),
            Headline(
                "comparisons won, more than at random at equal cost",
                "share, mean over prices",
                "above 0",
                key("area"),
            ),
        ],
        "gateway": [
            Headline(
                "one stream through `serve` beside Python",
                "ms a token more",
                "at most 3",
                key("overhead_ms_per_token"),
            ),
            Headline("sixteen callers", "x a batch of sixteen", "at least 0.8", key("callers_ratio")),
            Headline("four adapters", "x the plain model", "at least 0.8", key("adapters_ratio")),
            Headline(
                "useful tokens under ten times the load", "x peak", "at least 0.8", key("overload_ratio")
            ),
            Headline(
                "answers beside 1,000 idle connections", "x time", "at most 1.1", key("idle_time_ratio")
            ),
        ],
        "dashboard": [
            Headline("a killed node disappears from the page", "s", "at most 10", key("killed_node_seen_s")),
        ],
        "dashboard_page": [
            Headline(
                "512 peers and 126 blocks on the screen of a fresh Chromium",
                "s",
                "at most 1",
                lambda reports: [report["first_view_s"]["median"] for report in reports],
            ),
        ],
        "chat_page": [
            Headline(
                "the chat on the screen of a fresh Chromium",
                "s",
                "at most 0.5",
                lambda reports: [report["first_paint_s"]["median"] for report in reports],
            ),
            Headline(
                "longest frame while 10,000 tokens scroll",
                "s",
                "at most 0.1",
                lambda reports: [report["longest_frame_s"]["worst"] for report in reports],
            ),
        ],
    },
    "Hostile peers": {
        "audit": [],
        "hostile": [
            Headline(
                "p95 time between tokens under 10,000 hostile frames a second",
                "x before",
                "at most 2",
                key("p95_ratio"),
            ),
            Headline("growth of the node", "MiB", "at most 64", key("growth_mib", 0)),
            Headline("growth of its p2pd", "MiB", "at most 64", key("growth_mib", 1)),
        ],
    },
    "Training": {
        "training": [],
        "pipeline": [
            *(
                Headline(measured.format(row=name), unit, goals[number], key(field, row=row))
                for row, name, goals in (
                    ("int8", "int8 boundaries", ("at most 1.01", "0.25", "at least 3")),
                    ("int4", "int4 boundaries", ("at most 1.03", "0.125", "")),
                    ("float32:k=16", "a subspace of 16 of 64 dimensions", ("", "", "")),
                    ("int8:k=16", "this subspace in int8", ("", "", "")),
                )
                for number, (measured, unit, field) in enumerate(
                    (
                        ("{row}: validation loss after equal steps", "x float32", "loss_ratio"),
                        ("{row}: bytes", "x float32", "bytes_ratio"),
                        ("{row}: until the target loss", "x as fast as float32", "faster"),
                    )
                )
            ),
        ],
        "train_attacks": [],
        "train_churn": [
            Headline(
                "validation loss with a fault every 20 s", "x undisturbed", "at most 1.02", key("loss_ratio")
            ),
            Headline(
                "rounds committed under faults", "share", "at least 0.9", key("share_committed", run="churn")
            ),
            Headline(
                "longest exchange under faults", "s", "at most 15", key("longest_exchange_s", run="churn")
            ),
        ],
        "train_join": [
            Headline("a newcomer until its own steps", "x time of its bytes", "at most 2", key("ratio")),
            Headline(
                "until its first contribution",
                "x time of its bytes",
                "at most 2",
                key("ratio_until_it_contributed"),
            ),
        ],
        "train_overhead": [
            Headline("a lone worker", "x a bare loop", "at least 0.95", key("ratios")),
        ],
        "train_groups": [
            Headline(
                "a worker of 1,000 in groups sends in a round", "x the vector", "at most 2.3", key("vectors")
            ),
            Headline("states after a tenth has left", "", "1", key("states", round=1)),
            Headline("workers left behind by it", "", "", key("behind", round=1)),
        ],
        "train_traffic": [],
        "unequal": [],
        "zo_finetune": [],
        "forward_tuning": [],
    },
}


def measure(headline: Headline, reports: Sequence[Report]) -> Measurement | None:
    """The figures of one headline; None if the bench did not report it this time."""
    samples = sorted(headline.samples(reports))
    if not samples:
        return None
    p95 = samples[min(len(samples) - 1, math.ceil(0.95 * len(samples)) - 1)] if len(samples) > 1 else None
    return Measurement(
        headline.measured, headline.unit, len(samples), statistics.median(samples), p95, headline.goal
    )


def record(bench: str, options: Sequence[str]) -> None:
    """Run a bench and keep its figures. Figures that it does not report this time stay as they
    were."""
    [headlines] = [benches[bench] for benches in SECTIONS.values() if bench in benches]
    command = [sys.executable, "-W", "ignore", "-m", f"tests.bench.{bench}", *options]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    print(printed, end="")
    about = {
        "command": " ".join([bench, *map(without_path, options)]),
        "machine": machine(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    new = [measured for each in headlines if (measured := measure(each, reports)) is not None]
    kept = [row for row in load(bench) if row["measured"] not in {each.measured for each in new}]
    rows = [*(asdict(each) | about for each in new), *kept]
    order = {each.measured: number for number, each in enumerate(headlines)}
    rows.sort(key=lambda row: order.get(row["measured"], len(order)))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{bench}.json").write_text(json.dumps(rows, indent=1) + "\n")


def without_path(option: str) -> str:
    """The option with PATH in place of a path, which says nothing to readers on other machines."""
    name, equals, value = option.rpartition("=")
    return f"{name}{equals}PATH" if Path(value).expanduser().is_absolute() else option


def load(bench: str) -> list[dict[str, Any]]:
    """The kept measurements of a bench."""
    path = FOLDER / f"{bench}.json"
    return json.loads(path.read_text()) if path.exists() else []


def machine() -> str:
    """The processor, and how many of its cores this process may use.

    Cloud machines hide the name of the model. Its numbers still tell a Zen 4 from a Zen 5.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    # The first of several equal keys stays.
    about = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    name = about.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {about[key]}" for key in ("cpu family", "model") if key in about]
    return ", ".join([f"{len(os.sched_getaffinity(0))} cores of {name}", *numbers])


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def page() -> str:
    """RESULTS.md."""
    lines = [
        "# Results",
        "",
        "`python -m tests.bench.results write` makes this page from [results/](results/); do not edit it.",
        "Each line is the latest run of one measurement:",
        "`python -m tests.bench.results record BENCH [options]` replaces it. Machines are shared, so ratios",
        "within one run say more than rates. [Reports](reports/) tell what was tried, and",
        "[decisions](../../docs/decisions/) what follows from it.",
    ]
    for section, benches in SECTIONS.items():
        rows = [row for bench in benches for row in load(bench)]
        if not rows:
            continue
        lines += ["", f"## {section}", ""]
        lines += [
            "| measured | median | p95 | n | goal | command | commit | machine |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            p95 = "" if row["p95"] is None else _figure(row["p95"])
            lines.append(
                f"| {row['measured']} | {_figure(row['median'])} {row['unit']} | {p95} | {row['n']} | {row['goal']} | "
                f"`{row['command']}` | {row['commit']} | {row['machine']} |"
            )
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="what", required=True)
    recording = parts.add_parser("record")
    recording.add_argument(
        "bench",
        choices=[bench for benches in SECTIONS.values() for bench, headlines in benches.items() if headlines],
    )
    recording.add_argument("options", nargs=argparse.REMAINDER)
    parts.add_parser("write")
    chosen = parser.parse_args(arguments)
    if chosen.what == "record":
        record(chosen.bench, chosen.options)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
