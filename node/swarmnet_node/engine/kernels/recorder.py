"""CUDA graphs: a computation is recorded once, and replayed with one launch instead of one for each operation."""

from collections.abc import Callable

import torch

from swarmnet_node.engine.kernels.backend import Recording


class CudaRecorder:
    """Records on one device. All recordings share one pool of memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> Recording:
        """Record ``compute``, which has run before and reads and writes memory at fixed addresses.

        Raises ``RuntimeError`` if it does what cannot be recorded, such as reading a value back.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = compute()
        return Recording(outputs, graph.replay)
