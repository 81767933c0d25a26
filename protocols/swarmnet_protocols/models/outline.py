"""Fetches the outline of a model, everything except its weights, from peers.

This is for swarms whose file names the model's hash, when the hub does not answer.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swarmnet_protocols.errors import IntegrityError, Unreachable
from swarmnet_protocols.fetching.download import download
from swarmnet_protocols.fetching.hub_files import HubFiles, parts_folder
from swarmnet_protocols.fetching.peers import SwarmPeers, WeightStream, fetch_document, fetch_file
from swarmnet_protocols.fetching.pieces import ModelFile, Tables
from swarmnet_protocols.machine.files import make_private, write_whole
from swarmnet_protocols.models.checkpoints.model_folder import MAX_METADATA_BYTES
from swarmnet_protocols.models.checkpoints.safetensors_file import INDEX_NAME, METADATA_PATTERNS
from swarmnet_protocols.models.manifest import MAX_JSON_BYTES, Manifest
from swarmnet_protocols.wire import weights_pb2 as pb

_MANIFEST_NAME = "manifest.json"
_SMALL = (*METADATA_PATTERNS, INDEX_NAME)


async def fetch_outline(peers: SwarmPeers, name: str, model: bytes, cache_dir: Path) -> None:
    """Fetch the outline of the model with this manifest hash from peers, so that ``find_outline``
    finds ``name`` without the hub.

    Raises ``Unreachable`` if no peer has all of it.
    """

    async def manifest_of(stream: WeightStream) -> Manifest:
        found = Manifest.from_json(
            await fetch_document(stream, model, pb.WHAT_MANIFEST, max_bytes=MAX_JSON_BYTES)
        )
        if found.hash != model:
            raise IntegrityError("the manifest of another model")
        return found

    manifest = await peers.first(model, manifest_of)
    folder = _folder(name, cache_dir)
    make_private(folder)
    files = manifest.files
    has_index = any(file.name == INDEX_NAME for file in files)
    for file in files:
        if file.name in _SMALL:
            content = await _fetch_small(peers, model, file)
            write_whole(folder / file.name, content)
        elif not has_index:  # without an index, only the header lists the tensors
            await _fetch_head(peers, model, file, cache_dir)
    write_whole(folder / _MANIFEST_NAME, manifest.to_json().encode())


async def _fetch_small(peers: SwarmPeers, model: bytes, file: ModelFile) -> bytes:
    if file.size > MAX_METADATA_BYTES:
        raise IntegrityError(f"{file.name} is larger than {MAX_METADATA_BYTES} bytes")

    async def content_of(stream: WeightStream) -> bytes:
        content = await fetch_file(stream, model, file)
        if hashlib.sha256(content).digest() != file.sha256:
            raise IntegrityError(f"{file.name} does not have its hash")
        return content

    return await peers.first(model, content_of)


async def _fetch_head(peers: SwarmPeers, model: bytes, file: ModelFile, cache_dir: Path) -> None:
    """Fetch the header of a weight file. Only a known table of pieces, or the hash of the whole
    file, verifies it."""
    tables = Tables(cache_dir / "pieces")
    await peers.tables(model, [file], tables)
    table = tables.known(file) or tables.claimed(file)
    if table is None:
        raise Unreachable(f"no peer has the pieces of {file.name}")
    partial = _hub("", file.name, [file], cache_dir).partial(file.name)
    partial.create()
    partial.use(table, None)
    async with peers.sources(model, [file]) as sources:
        await download([(partial, range(len(table.head_starts) - 1))], sources)


def find_outline(
    name: str, repository: str, revision: str | None, cache_dir: Path
) -> tuple[Path, HubFiles] | None:
    """Return the folder or gguf file of a model whose outline came from peers, and the source of
    its weights. None without an outline."""
    folder = _folder(name, cache_dir)
    with suppress(OSError, IntegrityError):
        manifest = Manifest.from_json((folder / _MANIFEST_NAME).read_bytes())
        weights = [file for file in manifest.files if file.name not in _SMALL]
        hub = _hub(repository, revision or "main", weights, cache_dir)
        if not weights[0].name.endswith(".gguf"):
            return folder, hub
        partial = hub.partial(weights[0].name)
        if partial.exists:
            return partial.path, hub
    return None


def _hub(repository: str, revision: str, files: Sequence[ModelFile], cache_dir: Path) -> HubFiles:
    known = {file.name: (file.size, file.sha256) for file in files}
    return HubFiles(repository, revision, known, parts_folder(cache_dir))


def _folder(name: str, cache_dir: Path) -> Path:
    return cache_dir / "outlines" / hashlib.sha256(name.encode()).hexdigest()[:32]
