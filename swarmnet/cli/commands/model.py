"""``swarmnet model``: the models on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.cli.lazy import command_group
from swarmnet.cli.options import CacheDirOption, JsonFlag
from swarmnet.cli.output import print_json, print_table, print_text, progress
from swarmnet.paths import default_cache_dir
from swarmnet.units import counted, show_size
from swarmnet_protocols.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from swarmnet_protocols.models import LocalModel

app = command_group("Fetch and check model files.")
ModelName = Annotated[str, typer.Argument(metavar="M", help="As for join.")]


@app.command("ls")
def list_models(*, as_json: JsonFlag = False) -> None:
    """List the models on this machine: the default one, and those fetched from the hub."""
    models: list[dict[str, object]] = [{"name": DEFAULT_MODEL, "default": True}, *_hub_models()]
    if as_json:
        print_json({"models": models})
        return
    for model in models:
        print_text(f"{model['name']}{'  (the default)' if model['default'] else ''}")


@app.command("pull")
def pull(
    model: ModelName = DEFAULT_MODEL, *, cache_dir: CacheDirOption = None, as_json: JsonFlag = False
) -> None:
    """Fetch a model unless it is on this machine."""
    local = _resolve(model, cache_dir, quiet=as_json)
    local.fetch()
    if as_json:
        print_json(_summary(local))
    else:
        print_text(f"{local.name} is at {local.path}")


@app.command("show")
def show(
    model: ModelName = DEFAULT_MODEL, *, cache_dir: CacheDirOption = None, as_json: JsonFlag = False
) -> None:
    """Print a model's architecture, blocks, size and manifest."""
    local = _resolve(model, cache_dir, quiet=as_json)
    if as_json:
        print_json(_summary(local))
        return
    longest = max(len(file.path) for file in local.manifest.files)
    files = "\n".join(
        f"{file.path:<{longest}}  {show_size(file.size):>7}  {file.sha256.hex()}"
        for file in local.manifest.files
    )
    summary = _summary(local)
    print_table(
        local.name, {key: summary[key] for key in summary if key not in {"name", "files"}} | {"files": files}
    )


@app.command("verify")
def verify(
    model: ModelName = DEFAULT_MODEL, *, cache_dir: CacheDirOption = None, as_json: JsonFlag = False
) -> None:
    """Read every file of a model that is on this machine again and compare it with the manifest."""
    local = _resolve(model, cache_dir, quiet=as_json)
    with progress(quiet=as_json) as report:
        local.verify(report)
    if as_json:
        print_json({"name": local.name, "manifest": local.manifest.hash.hex(), "valid": True})
    else:
        count = counted(len(local.present_files), "file")
        missing = len(local.manifest.files) - len(local.present_files)
        rest = f"; {missing} not on this machine" if missing else ""
        print_text(f"{local.name}: {count} read, as the manifest says{rest}")


def _hub_models() -> list[dict[str, object]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    names = sorted(repository.repo_id for repository in repositories if repository.repo_type == "model")
    return [{"name": name, "default": False} for name in names]


def _resolve(name: str, cache_dir: Path | None, *, quiet: bool) -> "LocalModel":
    from swarmnet_protocols.models import resolve

    with progress(quiet=quiet) as report:
        return resolve(name, cache_dir=cache_dir or default_cache_dir(), progress=report)


def _summary(local: "LocalModel") -> dict[str, object]:
    manifest = local.manifest
    return {
        "name": local.name,
        "path": str(local.path),
        "manifest": manifest.hash.hex(),
        "architecture": manifest.architecture,
        "blocks": manifest.blocks,
        "hidden_size": manifest.hidden_size,
        "files": [
            {"path": file.path, "size": file.size, "sha256": file.sha256.hex()} for file in manifest.files
        ],
    }
