"""The events and the status of a training worker as sentences, for ``train join`` and ``train
status``."""

from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.cli.training.displays import Bar, Fields, Telling
from swarmnet.units import counted, show_memory, show_size

if TYPE_CHECKING:
    from swarmnet_protocols.training.job_settings import DataSource, Job


def facts_of(
    job: "Job",
    *,
    id: str,
    name: str,
    device: str,
    disk: Path,
) -> dict[str, str]:
    """Return what a job reads, sends and uses on this machine. Paths in it were given by this
    machine's user, not by the job's author."""
    begins = f"the checkpoint {job.model.checkpoint}" if job.model.is_checkpoint else "a new model"
    sent = "an adapter" if job.model.is_lora else "the model's weights"
    told = "parts of the data can be reconstructed from them"
    if any(source.is_own for source in job.data.sources):
        told = (
            "the text of your files can be reconstructed from them in part, and with allreduce word for word"
        )
    if job.stages is not None:
        sent = "its stage's weights"
        told += "; and what a microbatch becomes in each stage, from which its text can be reconstructed, to the workers of other stages"
    return {
        "job": f"{job.job.name}, {counted(job.job.rounds, 'round')} of {job.method.name}; its id is {id}",
        "reads": "; ".join(map(_read, job.data.sources)),
        "begins with": begins,
        "sends": f"changes of {sent}, to the other workers; {told}"
        + (f"; to everybody the name {name}" if name else ""),
        "computes on": device,
        "keeps": f"checkpoints in {disk}",
    }


def _read(source: "DataSource") -> str:
    from swarmnet_protocols.training.job_settings import PYTHON_STDLIB

    if source.is_own:
        return f"{source.path}, files of your own, which stay here"
    if source.hub is not None:
        read = f"the dataset {source.hub} of the hub"
    elif source.path == PYTHON_STDLIB:
        read = "the source of this Python's standard library"
    else:
        read = f"{source.path}, as you chose"
    if source.size_bytes is not None:
        read += f": {show_size(source.size_bytes)} at most; files with another hash are refused"
    return read


def code_facts(job: "Job", method: Path | None) -> dict[str, str]:
    """Return the foreign code that a job runs on this machine: the method from outside that this
    machine's user chose, or nothing."""
    if job.method.code is None:
        return {}
    source = f"{method}, as you chose" if method else "an installed package"
    said = f"the method {job.method.name} of {source}: it may do whatever you may; its SHA-256 is {job.method.code}"
    return {"runs code": said}


def tell(event: Fields, status: Fields) -> Telling:
    """Return an event of a worker for the display. ``status`` is the status in its
    ``TrainingRecord`` after the event."""
    bar = Bar("rounds", status["round"], status["rounds"]) if "rounds" in status else None
    return Telling(sentence(event), _is_news(event), summary(status), bar)


def model_of(job: "Job") -> str:
    """Return the model of a job in a few words."""
    section = job.model
    if section.config is not None:
        return f"a new {section.config['model_type']}"
    return section.checkpoint or f"files of its owner, manifest {str(section.manifest)[:16]}…"


def job_summary(job: Fields) -> str:
    """Return the progress of a job in one line."""
    if job["round"] is None:
        return f"no worker yet, {counted(job['rounds'], 'round')} to do"
    return ", ".join([*_numbers(job, job["rounds"]), counted(job["workers"] or 0, "worker")])


def worker_summary(worker: Fields, rounds: int) -> str:
    """Return the progress of a worker as it reports it, in one line."""
    stage = [] if worker["stage"] is None else [f"stage {worker['stage']}"]
    return ", ".join([worker["state"] or "gives no report", *stage, *_numbers(worker, rounds)])


def stage_name(stage: Fields) -> str:
    """Return a stage of a job with its blocks."""
    if stage["blocks"] is None:
        return f"stage {stage['stage']}"
    start, end = stage["blocks"]
    ends = ["both ends"] if stage["stage"] == 0 else []
    return f"stage {stage['stage']}: " + " and ".join(
        ends + ([f"blocks {start}:{end}"] if end > start else [])
    )


def stage_summary(stage: Fields) -> str:
    """Return the workers of a stage and their recent rates, in one line."""
    parts = [counted(len(stage["workers"]), "worker")]
    if stage["missing"]:
        parts[0] += f" ({counted(stage['missing'], 'replica')} missing)"
    if stage["occupancy"] is not None:
        parts.append(f"{stage['occupancy']:.0%} of the time computing")
    if stage["waits_for"] is not None:
        parts.append(f"otherwise waiting for stage {stage['waits_for']}")
    if stage["tokens_per_s"] is not None:
        parts.append(f"{stage['tokens_per_s']:,.0f} tokens/s")
    if stage["bytes_per_token"] is not None:
        parts.append(f"{show_size(round(stage['bytes_per_token']))} a token to and from the next stage")
    return ", ".join(parts)


def _numbers(status: Fields, rounds: int) -> list[str]:
    parts = [f"round {status['round']} of {rounds}"]
    for name, label in (("loss", "loss"), ("val_loss", "validation")):
        if status.get(name) is not None:
            parts.append(f"{label} {status[name]:.4f}")
    return parts


def summary(status: Fields) -> str:
    """Return the status of a worker in one line."""
    parts = _numbers(status, status["rounds"]) if "rounds" in status else []
    if status.get("stage") is not None:
        parts.insert(0, f"stage {status['stage']} of {status['stages']}")
    if "workers" in status:
        parts.append(counted(status["workers"], "worker"))
        parts.append(
            f"{show_size(status['bytes_sent'])} sent, {show_size(status['bytes_received'])} received"
        )
    if "wait_share" in status:
        parts.append(f"{status['wait_share']:.0%} of the time waiting")
    return ", ".join(parts)


def sentence(event: Fields) -> str:
    """Return an event as a sentence."""
    match event["event"]:
        case "round":
            outcome = "committed" if event["committed"] else f"discarded ({event['reason']})"
            did = counted(event["own_tokens"], "token") if event.get("own_tokens") else "only listened"
            loss = did if event["loss"] is None else f"loss {event['loss']:.4f}"
            sent, received = show_size(event["bytes_sent"]), show_size(event["bytes_received"])
            text = (
                f"round {event['round']} {outcome}: {loss}, {counted(event['workers'], 'worker')}, "
                f"{sent} sent, {received} received, {event['wait_s']:.1f} s waited"
            )
            excluded = (f"  excluded {each['peer_id']}: {each['reason']}" for each in event["excluded"])
            return "\n".join([text, *excluded])
        case "eval":
            return f"round {event['round']}: validation loss {event['val_loss']:.4f}"
        case "ready":
            text = f"training {event['name']} as {event['peer_id']}; others join with --bootstrap and one of"
            return "\n".join([text, *(f"  {address}" for address in event["addresses"])])
        case "memory":
            return f"training takes {show_memory(event['bytes'])} of memory"
        case "privacy":
            return (
                f"privacy: epsilon {event['epsilon']:.2f} of a row so far, {event['epsilon_at_end']:.2f} "
                f"after all rounds (delta {event['delta']:g})"
            )
        case "waiting":
            return f"round {event['round']}: waiting for more workers, {event['workers']} so far"
        case "spare":
            return (
                f"this worker is a spare: the job has its {event['max_workers']} workers (max_workers), and "
                "this one takes the place of the next worker that leaves"
            )
        case "stage_missing":
            return f"round {event['round']} waits: stage {event['missing']} has no worker; `swarmnet train join JOB --stage {event['missing']}` on another machine takes it"
        case "stage_lost":
            return f"stage {event['stage']} cannot go on, and will try again: {event['reason']}"
        case "moving":
            return f"moves from stage {event['stage']} to stage {event['to']} after this round: {event['reason']}"
        case "restored":
            return f"took the stage up at round {event['round']} with {event['source']}"
        case "copy":
            return f"keeps a copy of stage {event['stage']} after {counted(event['round'], 'round')}, as it has one worker: {show_size(event['bytes'])}"
        case "healed":
            dropped = (f"; dropped {each['peer_id']}: {each['reason']}" for each in event["dropped"])
            size = show_size(event["bytes"])
            return (
                f"fetched the state of round {event['round']}: {size} in {event['seconds']:.1f} s"
                + "".join(dropped)
            )
        case "identity":
            return str(event["warning"]) or "the other process under this identity is gone"
        case "notice":
            return str(event["text"])
        case "paused":
            return f"paused: {event['reason']}"
        case "leaving":
            return "leaving after this round; press Ctrl-C again to leave at once"
        case "finished":
            return (
                f"finished; this worker keeps its stage for {event['stays_s'] / 60:.0f} minutes: collect the "
                "model with `swarmnet train export --swarm`"
            )
        case "done" if event["round"] < event["rounds"]:
            return f"left after {counted(event['round'], 'round')} of {event['rounds']}; the same command continues from there"
        case "done":
            return (
                f"trained: {counted(event['round'], 'round')}, {event['revision']} of them committed; "
                "`swarmnet train export --out DIR` writes the model"
            )
        case "heal_failed":
            return (
                f"could not fetch the state of round {event['round']}, and will try again: {event['reason']}"
            )
        case "behind":
            return f"round {event['round']} ended without this worker ({event['reason']}); asking the others whether the round was committed"
        case "lost":
            return f"round {event['round']}: the microbatches of {event['tokens']} tokens are lost with their workers; this stage counts {event['counted']}"
        case "merge" if event["committed"]:
            return f"all {event['workers']} replicas are one model, their average"
        case "merge":
            return f"the replicas were not averaged ({event['reason']}): this worker keeps its own"
        case kind:
            rest = ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")
            return f"{kind}: {rest}" if rest else str(kind)


def _is_news(event: Fields) -> bool:
    """Return whether an event says more than the bars show."""
    if event["event"] == "round":
        return not event["committed"] or bool(event["excluded"])
    if event["event"] == "privacy":
        return event["next_round"] is None
    return event["event"] not in {"copy", "eval", "waiting"}
