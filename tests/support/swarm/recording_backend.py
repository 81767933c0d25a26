"""A backend that records decode steps where there is no GPU: a recording computes again into the
same outputs."""

from collections.abc import Callable

import torch

from swarmnet_node.engine.kernels.backend import Recorder, Recording
from swarmnet_node.engine.kernels.torch_backend import TorchBackend


class FakeRecorder:
    """A ``Recorder`` that counts recordings and replays. ``broken`` changes what a replay computes;
    ``error`` is raised instead of recording."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.broken: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.error: Exception | None = None

    def record(self, compute: Callable[[], torch.Tensor]) -> Recording:
        if self.error is not None:
            raise self.error
        outputs = compute()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            found = compute()
            outputs.copy_(found if self.broken is None else self.broken(found))

        return Recording(outputs, replay)


class RecordingBackend(TorchBackend):
    """``TorchBackend`` whose recorder is ``fake``, on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeRecorder()

    def recorder(self, device: torch.device) -> Recorder | None:
        return self.fake
