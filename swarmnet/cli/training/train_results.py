"""``swarmnet train export`` and ``train plot``: the model and the curves of a job."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from swarmnet.cli.options import CacheDirOption, DataDirOption, JsonFlag
from swarmnet.cli.output import note, print_json, print_text, progress
from swarmnet.cli.training.job_names import JobArguments, OptionalJobArgument, job_here, jobs_here, short_ids
from swarmnet.cli.training.record import newest_job, read_history
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.lean_imports import import_transformers


def export(
    job: OptionalJobArgument = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the model to this new directory.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model.")] = False,
    data_dir: DataDirOption,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Write the newest model of a job with its tokenizer, in Hugging Face layout, as transformers
    loads it. Of a job that trains an adapter, write the adapter as PEFT loads it."""
    with progress(quiet=as_json) as report:
        job = job_here(job, data_dir)
        import_transformers()
        from swarmnet_node.training.checkpoint import export_model
        from swarmnet_protocols.training.job_settings import BYTES

        exported = export_model(data_dir, job, out, cache_dir=cache_dir, overwrite=force, progress=report)
    tokenizer, base = exported.data.tokenizer, exported.model.checkpoint or ""
    if as_json:
        print_json({"job": job, "path": str(out), "tokenizer": tokenizer})
        return
    if exported.model.is_lora:
        print_text(f"the adapter is in {out}")
        words = ["swarmnet", "run", base, "YOUR QUESTION", "--raw", "--adapter", str(out)]
        note(f"ask the model with it: {shlex.join(words)} --swarm SWARM")
        return
    print_text(f"the model is in {out}")
    if tokenizer == BYTES:
        note("it reads bytes: token N is byte N, and 0 ends a document")


def plot(
    jobs: JobArguments = [],  # noqa: B006 - typer copies it
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the PNG files to this folder.")],
    data_dir: DataDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Draw the loss of the worker on this machine against tokens, bytes sent and time. Several jobs
    are drawn together, to compare them."""
    with progress(quiet=as_json):
        ids, paths = _drawn(jobs, out, data_dir)
    if as_json:
        print_json({"jobs": ids, "paths": [str(path) for path in paths]})
    else:
        print_text("\n".join(str(path) for path in paths))


def _drawn(jobs: list[str], out: Path, data_dir: Path) -> tuple[list[str], list[Path]]:
    """Draw the curves of the jobs, or of the newest job. Return their ids and the pictures."""
    from swarmnet.cli.training.plots import plot_histories

    ids = list(dict.fromkeys(job_here(job, data_dir) for job in jobs)) or [newest_job(data_dir)]
    names, short = jobs_here(data_dir), short_ids(ids)
    runs = {}
    for id in ids:
        points = list(read_history(data_dir / "training" / id))
        if not points:
            raise ConfigError(
                f"the worker of job {short[id]} has no round yet", hint="try again after its first round"
            )
        name = names.get(id) or short[id]
        runs[name if name not in runs else f"{name} {short[id]}"] = points
    return ids, plot_histories(runs, out)
