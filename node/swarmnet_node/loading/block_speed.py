"""Measures how fast this machine computes blocks of a model, for ``swarmnet bench --local``."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.loading.reading import check_quantizable
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.machine.devices import pick_devices, pick_dtype
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.quantization.products import SOURCE, times_by_format

PROMPT_POSITIONS = 512
"""Positions of the timed prompt. A prompt reaches a host in chunks of about this length."""
BATCH = 8
"""Sequences of the timed batch, like as many users in the middle of an answer."""
REPEATS = 5


@dataclass(frozen=True)
class BlockSpeed:
    """Medians over a few forwards, in positions per second of one block."""

    device: str
    precision: str
    arithmetic: str
    """As in ``HostRecord``."""
    kernels: str
    """The target of the C code that computed. Empty where torch computes."""
    kernel_times: dict[str, dict[str, float]]
    """Format → target → its time of products here, as a multiple of the time of ``kernels``. Empty
    if there was nothing to choose."""
    blocks: int
    """Blocks that were loaded and timed together."""
    block_bytes: int
    """Bytes of one block's weights in memory."""
    decode: float
    """One token of one sequence at a time."""
    batch: float
    """One token of each of ``BATCH`` sequences."""
    prompt: float
    """A prompt of ``PROMPT_POSITIONS``."""


def measure_blocks(model: LocalModel, blocks: int, *, device: str, dtype: str, cache_dir: Path) -> BlockSpeed:
    """Load the first ``blocks`` as a host does, and time them.

    ``device`` and ``dtype`` take the values of ``swarmnet join``. Raises ``ConfigError`` if the
    model, device or format cannot be used.
    """
    where = pick_devices(device)[0]
    quantized = PRECISIONS.get(dtype)
    if quantized is not None:
        check_quantizable(model)
    stage = load_stage(
        model,
        0,
        blocks,
        dtype=pick_dtype("auto" if quantized is not None else dtype, where),
        device=where,
        backend=load_backend(cache_dir),
        packed=quantized is not None or dtype == "auto",
        quantized=quantized,
    )
    one, prompt = (torch.zeros(count, stage.hidden_size) for count in (1, PROMPT_POSITIONS))
    sequence, sequences = stage.new_sequence(), [stage.new_sequence() for _ in range(BATCH)]
    decode_s = _median_s(lambda: stage.forward([(sequence, one)]))
    batch_s = _median_s(lambda: stage.forward([(each, one) for each in sequences]))
    prompt_s = _median_s(lambda: stage.forward([(stage.new_sequence(), prompt)]))
    return BlockSpeed(
        device=str(where),
        precision=stage.precision,
        arithmetic=stage.arithmetic,
        kernels="" if stage.is_on_accelerator else native_code.loaded_target(SOURCE),
        kernel_times={} if stage.is_on_accelerator else times_by_format(cache_dir),
        blocks=blocks,
        block_bytes=stage.weight_bytes // blocks,
        decode=blocks / decode_s,
        batch=blocks * BATCH / batch_s,
        prompt=blocks * PROMPT_POSITIONS / prompt_s,
    )


def _median_s(forward: Callable[[], object]) -> float:
    """Return the median seconds of a forward, after two to warm up.

    Outputs come home to the CPU, so an accelerator has finished by then.
    """
    times = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        forward()
        times.append(time.perf_counter() - started)
    return sorted(times[2:])[REPEATS // 2]
