"""``swarmnet bench``: measures the speed of a swarm, or of this machine as a host."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.chat.generation import Answerer, RunAnswer, SamplingOptions, Screen, generate
from swarmnet.cli.commands.run import open_answerer
from swarmnet.cli.options import HostDtypeOption, JsonFlag, ModelArgument, WireOption, device_option
from swarmnet.cli.output import note, print_json, print_table, print_text, progress
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.units import show_size
from swarmnet_protocols.machine.lean_imports import import_transformers

if TYPE_CHECKING:
    from swarmnet_node.loading.block_speed import BlockSpeed

LOCAL_BLOCKS = 4
"""Most blocks timed with --local; a model may have fewer."""


def bench(  # noqa: PLR0913 - a command line, not an interface
    model: ModelArgument,
    *,
    swarm: Annotated[
        str | None,
        typer.Option(
            "--swarm",
            metavar="SWARM",
            help="The swarm to measure: a swarm.toml or its directory, an invite, or the name of a swarm joined before.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Measure how fast this machine computes the model's blocks, without a swarm."
        ),
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Tokens in each prompt.")
    ] = 128,
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", metavar="N", min=1, help="Tokens in each answer.")
    ] = 32,
    runs: Annotated[
        int,
        typer.Option(
            "--runs", metavar="N", min=1, help="Number of prompts. Each goes through a chain of its own."
        ),
    ] = 3,
    device: Annotated[str, device_option("With --local: the device of the blocks.")] = "auto",
    dtype: HostDtypeOption = "auto",
    wire: WireOption = "auto",
    client: ClientOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure a swarm as a client sees it: seconds to the first token, and tokens per second. With
    --local, measure this machine as a host.

    Prompts are random tokens. Speculation is off, because its gain depends on the text.

    \b
    Examples:
      swarmnet bench smollm2-135m-instruct --swarm lab
      swarmnet bench smollm2-135m-instruct --local --dtype float32
    """
    if local == (swarm is not None):
        raise typer.BadParameter(
            "give one of them: the swarm to measure, or this machine", param_hint="'--swarm' / '--local'"
        )
    if swarm is None:
        _print_local(_measure_here(model, client, device, dtype, quiet=as_json), as_json=as_json)
        return
    if dtype in {"int8", "int4"}:
        raise typer.BadParameter(
            f"hosts choose their own formats; {dtype} is for --local", param_hint="'--dtype'"
        )
    network = client.network(swarm)
    with (
        open_answerer(model, network, client, Screen(as_json), dtype=dtype, wire=wire) as opened,
        progress(quiet=as_json) as report,
    ):
        results = []
        for number in range(runs):
            report("measuring", number, runs)
            results.append(_measure(opened, prompt_tokens, tokens))
    _print(results, as_json=as_json)


def _measure(answerer: Answerer, prompt_tokens: int, tokens: int) -> RunAnswer:
    """Answer a prompt of random tokens. The rate of the answer counts the tokens after the
    first."""
    most = answerer.context
    if prompt_tokens + tokens > most:
        raise typer.BadParameter(
            f"the model takes {most} tokens, prompt and answer together", param_hint="'--prompt-tokens'"
        )
    ids = [random.randrange(answerer.vocabulary_size) for _ in range(prompt_tokens)]
    sampling = SamplingOptions(tokens, temperature=0.0, speculate=False)
    answer = generate(answerer, ids, sampling, Screen(as_json=True), exact=True)
    rate = (tokens - 1) / (answer.total_s - answer.first_token_s) if tokens > 1 else 0.0
    return replace(answer, tokens_per_s=rate)


def _print(results: Sequence[RunAnswer], *, as_json: bool) -> None:
    first_token_s = statistics.median(each.first_token_s for each in results)
    tokens_per_s = statistics.median(each.tokens_per_s for each in results)
    if as_json:
        names = ("first_token_s", "tokens_per_s", "failovers", "route")
        runs = [{name: each.to_json()[name] for name in names} for each in results]
        print_json({"first_token_s": first_token_s, "tokens_per_s": tokens_per_s, "runs": runs})
        return
    print_text("run     first token  tokens/s  chain")
    for number, each in enumerate(results, start=1):
        hops = " -> ".join(f"{hop.start}:{hop.end} …{hop.peer_id[-6:]}" for hop in each.route)
        print_text(f"{number:<6}  {each.first_token_s:>9.2f} s  {each.tokens_per_s:>8.1f}  {hops}")
    print_text(f"median  {first_token_s:>9.2f} s  {tokens_per_s:>8.1f}")
    if failovers := sum(each.failovers for each in results):
        note(f"hosts were replaced {failovers} times: the chains are those at the end of each run")


def _measure_here(
    name: str, client: ClientOptions, device: str, dtype: str, *, quiet: bool
) -> tuple["BlockSpeed", int]:
    """Return the speed of ``LOCAL_BLOCKS`` blocks, and the number of blocks of the model."""
    with progress(quiet=quiet) as report:
        import_transformers()
        from swarmnet_node.loading.block_speed import measure_blocks
        from swarmnet_protocols.models import resolve

        local = resolve(
            name, cache_dir=client.cache_dir, progress=report, max_disk_bytes=client.max_disk_bytes
        )
        total = local.manifest.blocks
        report("measuring", 0, None)
        speed = measure_blocks(
            local, min(LOCAL_BLOCKS, total), device=device, dtype=dtype, cache_dir=client.cache_dir
        )
        return speed, total


def _print_local(measured: tuple["BlockSpeed", int], *, as_json: bool) -> None:
    from swarmnet_node.loading.block_speed import BATCH, PROMPT_POSITIONS

    speed, total = measured
    if as_json:
        print_json({**asdict(speed), "total_blocks": total})
        return
    others = {target for times in speed.kernel_times.values() for target in times} - {speed.kernels}
    print_table(
        f"{speed.blocks} of {total} blocks on {speed.device}, {speed.precision}, {speed.arithmetic}",
        {
            **({"kernels": speed.kernels} if speed.kernels else {}),
            **{f"time with {target}": _ranges(speed.kernel_times, target) for target in sorted(others)},
            "weights": f"{show_size(speed.block_bytes)} a block",
            "decode": f"{speed.decode:.0f} tokens/s a block, {speed.decode / total:.1f} for the whole model",
            f"batch of {BATCH}": f"{speed.batch:.0f} tokens/s a block, {speed.batch / total:.1f} for the whole model",
            f"prompt of {PROMPT_POSITIONS}": f"{speed.prompt:.0f} tokens/s a block, {speed.prompt / total:.1f} for the whole model",
        },
    )


def _ranges(times: dict[str, dict[str, float]], target: str) -> str:
    """Return the least and the most relative time of a target, and the formats that have them."""
    least, most = (choose(times, key=lambda name: times[name][target]) for choose in (min, max))
    return f"{times[least][target]:.2f} ({least}) to {times[most][target]:.2f} x ({most})"
