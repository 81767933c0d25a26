"""Makes a worker begin with the progress of another job, which may have other cuts, or none.

Checkpoints name the tensors of the whole model. So the parts of several checkpoints, with the
moments of the optimizer and the outer state, make up any other part.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint
from swarmnet_node.training.model.building import STAGE_FILE, trained_parameters
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.safetensors_file import SafetensorsCheckpoint
from swarmnet_protocols.models.partial_model import build_whole

Shapes = Mapping[str, Sequence[int]]
"""The tensors of a part, by name, in the order of its vectors."""


def recut(stores: Sequence[Path], shapes: Shapes, job_id: str) -> WorkerCheckpoint:
    """Return a checkpoint of the part with ``shapes``, for the job ``job_id``.

    ``stores``: folders with checkpoints of one other job. The newest of each folder counts. Raises
    ``ConfigError`` if they are of different rounds, lack a tensor, or have other shapes.
    """
    found: dict[str, dict[str, Tensor]] = {}
    scalars: dict[str, Tensor] = {}
    parts = [_newest(store) for store in stores]
    if len({(each.job_id, each.round, each.revision) for each, _ in parts}) != 1:
        raise ConfigError(
            "these checkpoints are of different jobs or rounds",
            hint="name the checkpoints of all stages after the same round",
        )
    for saved, named in parts:
        for key, vector in _vectors(saved).items():
            if vector.dim() == 0:
                scalars[key] = vector
                continue
            sizes = [torch.Size(shape).numel() for shape in named.values()]
            if len(vector) != sum(sizes):
                raise ConfigError(f"{key!r} does not belong to single tensors", hint="use AdamW")
            pieces = zip(named.items(), torch.split_with_sizes(vector, sizes), strict=True)
            found.setdefault(key, {}).update({name: piece.view(*shape) for (name, shape), piece in pieces})
    made = scalars | {key: _joined(named, shapes) for key, named in found.items()}
    first = parts[0][0]
    return WorkerCheckpoint(
        job_id=job_id,
        round=first.round,
        revision=first.revision,
        parameters=made.pop("parameters"),
        optimizer={key.removeprefix(_INNER): each for key, each in made.items() if key.startswith(_INNER)},
        outer={key.removeprefix(_OUTER): each for key, each in made.items() if key.startswith(_OUTER)},
    )


_INNER, _OUTER = "optimizer.", "outer."


def _vectors(saved: WorkerCheckpoint) -> dict[str, Tensor]:
    named = {"parameters": saved.parameters}
    named |= {_INNER + name: each for name, each in saved.optimizer.items()}
    return named | {_OUTER + name: each for name, each in saved.outer.items()}


def _newest(store: Path) -> tuple[WorkerCheckpoint, Shapes]:
    """Return the newest checkpoint of a folder, and the tensors in its vectors."""
    checkpoints = CheckpointStore(store)
    found = checkpoints.newest_valid()
    saved = None if found is None else checkpoints.load_newest(found[1]["job"])
    if found is None or saved is None:
        raise ConfigError(f"{store} has no checkpoint", hint="name the folder of a stage, or of a job")
    folder = found[0]
    if (folder / STAGE_FILE).is_file():
        with safe_open(folder / STAGE_FILE, framework="pt") as file:
            return saved, {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    model = build_whole(SafetensorsCheckpoint(folder).config()).empty()
    model.requires_grad_(True)
    return saved, {name: each.shape for name, each in trained_parameters(model)}


def _joined(named: Mapping[str, Tensor], shapes: Shapes) -> Tensor:
    """Return the vector of the tensors with ``shapes``."""
    for name, shape in shapes.items():
        if name not in named or list(named[name].shape) != list(shape):
            raise ConfigError(
                f"these checkpoints have no {name} of shape {list(shape)}",
                hint="name the checkpoints of all stages, of a job with the same model",
            )
    return torch.cat([named[name].reshape(-1) for name in shapes])
