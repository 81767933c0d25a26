"""Messages between the workers of eight stages, in virtual time."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.net.protocol_ids import MICROBATCH, STEP
from swarmnet_protocols.training.pipeline.chains import WAYS
from swarmnet_protocols.wire import pipeline_pb2 as pb
from tests.support.network.memory_network import Delivery
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, staged_job
from tests.support.training.workers import train

STAGES = 8
HEARTBEAT = pb.StepRequest(heartbeat=pb.Heartbeat()).SerializeToString()
"""As all protocols of pipelines write it."""


def messages(folder: Path, workers: int, batch: int) -> Counter[str]:
    """Return the messages of each protocol in the third round, without heartbeats, by worker."""
    sent, at = Counter[str](), dict[int, Counter[str]]()

    def count(delivery: Delivery) -> None:
        sent[delivery.protocol.id] += delivery.message.header != HEARTBEAT

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            at.setdefault(event["round"], sent.copy())

    job = staged_job(folder, rounds=3, workers=workers // STAGES, stages=STAGES, batch=2 * batch)
    lab = StageLab(folder, job.replace("num_hidden_layers = 4", f"num_hidden_layers = {STAGES}"))
    lab.wanted = watch
    lab.network.observers.append(count)
    run(train(lab, *names(dict.fromkeys(range(STAGES), workers // STAGES))))
    lab.check_books()
    return Counter({protocol: round((at[2][protocol] - at[1][protocol]) / workers) for protocol in sent})


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [24, 96])
def test_messages_of_a_worker_do_not_grow_with_the_job(workers: int, tmp_path: Path) -> None:
    found = messages(tmp_path, workers, 8)
    assert found[STEP.id] <= 4 * 2 * WAYS  # conversations of four messages
    assert found[MICROBATCH.id] <= 4 * 8 + 1  # begin, admitted, outputs, gradient
