"""``swarmnet model``: the models on this machine."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.lazy import command_group
from swarmnet.cli.options import CacheDirOption, JsonFlag, MaxDiskOption, ModelArgument
from swarmnet.cli.output import print_json, print_result, print_table, print_text, progress
from swarmnet.units import counted, show_size
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine import lean_imports
from swarmnet_protocols.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from swarmnet_protocols.models import LocalModel

app = command_group("Fetch, check and remove model files.")


@app.command("ls")
def list_models(*, cache_dir: CacheDirOption, as_json: JsonFlag = False) -> None:
    """List the models on this machine, with their size on disk."""
    from swarmnet_protocols.models.inventory import stored_models

    stored = stored_models(cache_dir)
    if as_json:
        models: list[dict[str, object]] = [{"name": DEFAULT_MODEL, "default": True}]
        models += [
            {
                "name": each.name,
                "default": False,
                "present_bytes": each.present_bytes,
                "total_bytes": each.total_bytes,
            }
            for each in stored
        ]
        print_json({"models": models})
        return
    print_text(f"{DEFAULT_MODEL}  (the default)")
    for each in stored:
        whole = f" of {show_size(each.total_bytes)}" if each.total_bytes is not None else ""
        print_text(f"{each.name}  {show_size(each.present_bytes)}{whole}")


@app.command("rm")
def remove(
    model: Annotated[
        str, typer.Argument(metavar="M", help="The model's name, as `swarmnet model ls` prints it.")
    ],
    *,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Remove a fetched model from this machine."""
    from swarmnet_protocols.models.inventory import remove_model

    freed = remove_model(model, cache_dir)
    text = f"{model} is removed, which freed {show_size(freed)}"
    print_result({"name": model, "freed_bytes": freed}, text, as_json=as_json)


@app.command("pull")
def pull(
    model: ModelArgument = DEFAULT_MODEL,
    *,
    cache_dir: CacheDirOption,
    max_disk_bytes: MaxDiskOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Download the files of a model that this machine lacks."""
    from swarmnet_protocols.models import resolve

    with progress(quiet=as_json) as report:
        lean_imports.use()
        local = resolve(model, cache_dir=cache_dir, progress=report, max_disk_bytes=max_disk_bytes)
        local.fetch()
    print_result(_summary(local), f"{local.name} is at {local.path}", as_json=as_json)


@app.command("show")
def show(
    model: ModelArgument = DEFAULT_MODEL, *, cache_dir: CacheDirOption, as_json: JsonFlag = False
) -> None:
    """Print a model's architecture, blocks, size and manifest."""
    local = _resolve(model, cache_dir, quiet=as_json)
    if as_json:
        print_json(_summary(local))
        return
    longest = max(len(file.name) for file in local.manifest.files)
    files = "\n".join(
        f"{file.name:<{longest}}  {show_size(file.size):>7}  {file.sha256.hex()}"
        for file in local.manifest.files
    )
    summary = _summary(local)
    rows = {key: summary[key] for key in summary if key not in {"name", "files"}}
    if text := _memory_notice(local):
        rows["memory"] = text
    print_table(local.name, rows | {"files": files})


@app.command("publish")
def publish(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The model: a directory such as `train export` writes, or a .gguf file."
        ),
    ],
    *,
    swarm: Annotated[
        Path,
        typer.Option("--swarm", metavar="SWARM", help="The swarm.toml or its directory.", show_default=False),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the model in the swarm.", show_default="the folder's name"
        ),
    ] = None,
    cache_dir: CacheDirOption,
    as_json: JsonFlag = False,
) -> None:
    """Give a model of yours a name in a swarm. Peers then run and host it by this name, and fetch
    its weights from each other.

    With the authority's key next to swarm.toml, the file lists the model, so that nobody can take
    its name. Otherwise the hosts of the model announce the name.
    """
    from swarmnet import swarm_file
    from swarmnet.cli.commands.swarm.swarm import listed_model
    from swarmnet.swarm_file import writer
    from swarmnet.swarm_file.keys import KEY_NAME
    from swarmnet_protocols.machine.clock import wall_clock

    file = swarm_file.load(swarm)
    signs = file.authority is not None and (swarm_file.file_in(swarm).parent / KEY_NAME).exists()
    listed = listed_model(model, cache_dir, quiet=as_json)
    if not signs and name not in {None, listed.name}:
        raise ConfigError(
            f"without the authority's key, the model has the name of its folder: {listed.name}",
            hint=f"rename the folder to {name}, or run this where authority.key is",
        )
    listed = replace(listed, name=name or listed.name)
    if signs:
        file = writer.list_model(swarm, listed, now=wall_clock())
    host = shlex.join(["swarmnet", "join", str(swarm), "--model", model])
    run = shlex.join(["swarmnet", "run", listed.name, "--swarm", str(swarm)])
    if as_json:
        print_json(
            {
                "name": listed.name,
                "manifest": f"sha256:{listed.manifest.hex()}",
                "listed": signs,
                "serial": file.serial,
                "host": host,
                "run": run,
            }
        )
        return
    if signs:
        print_text(f"{listed.name} is in the swarm file, serial {file.serial}: give the file out again")
    else:
        print_text(f"{listed.name} gets its name from its hosts: the swarm file is not signed here")
    print_text(f"host it: {host}\nothers host it: swarmnet join SWARM --model {listed.name}\nrun it: {run}")


@app.command("verify")
def verify(
    model: ModelArgument = DEFAULT_MODEL, *, cache_dir: CacheDirOption, as_json: JsonFlag = False
) -> None:
    """Hash all files of a model on this machine and compare the hashes with the model's
    manifest."""
    local = _resolve(model, cache_dir, quiet=as_json)
    with progress(quiet=as_json) as report:
        local.verify(report)
    count = counted(len(local.present_files), "file")
    missing = len(local.manifest.files) - len(local.present_files)
    text = f"{local.name}: {count} as in the manifest" + (
        f"; {missing} not on this machine" if missing else ""
    )
    fields = {"name": local.name, "manifest": local.manifest.hash.hex(), "valid": True}
    print_result(fields, text, as_json=as_json)


def _memory_notice(local: "LocalModel") -> str:
    """Return a sentence on the model's memory on a CPU; empty unless it exceeds the files' size."""
    import torch

    return local.sizes(*local.manifest.tensors).notice("all weights", torch.float32)


def _resolve(name: str, cache_dir: Path, *, quiet: bool) -> "LocalModel":
    from swarmnet_protocols.models import resolve

    with progress(quiet=quiet) as report:
        return resolve(name, cache_dir=cache_dir, progress=report)


def _summary(local: "LocalModel") -> dict[str, object]:
    manifest = local.manifest
    return {
        "name": local.name,
        "path": str(local.path),
        "manifest": manifest.hash.hex(),
        "architecture": manifest.architecture,
        "blocks": manifest.blocks,
        "hidden_size": manifest.hidden_size,
        "pieces": local.pieces_hash.hex() if local.pieces_hash is not None else None,
        "present_bytes": local.size_on_disk,
        "files": [
            {"path": file.name, "size": file.size, "sha256": file.sha256.hex()} for file in manifest.files
        ],
    }
