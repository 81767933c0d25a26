"""Averaging over real libp2p streams, which the simulator replaces."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import torch
import uvloop

from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.rounds.averaging import Averager
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember
from tests.support.models.rounding import assert_sum
from tests.support.training.lab import JOB

from .conftest import LOOPBACK

pytestmark = pytest.mark.slow

SIZE = 2_000_000
TIMING = RoundTiming(contribution_s=8.0, majority_s=12.0, deadline_s=18.0)


def test_three_workers_average_and_two_continue_when_one_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            identities = [Identity.load_or_create(tmp_path / name) for name in ("0", "1", "leaving")]
            keys = {identity.peer_id: identity for identity in identities}
            transports = [
                await stack.enter_async_context(
                    P2pdTransport.create(P2pdConfig(tmp_path / str(index), listen=LOOPBACK))
                )
                for index in range(2)
            ]
            leaving = contextlib.AsyncExitStack()
            transports.append(
                await leaving.enter_async_context(
                    P2pdTransport.create(P2pdConfig(tmp_path / "leaving", listen=LOOPBACK))
                )
            )
            members = [RoundMember(each.peer_id, tuple(each.addresses()), 1e7) for each in transports]
            exchanges = [
                await stack.enter_async_context(
                    Averager(RoundContext(each, JOB, keys[each.peer_id].sign, TIMING))
                )
                for each in transports
            ]
            values = [torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

            async def average(index: int, round: int) -> Outcome:
                return await exchanges[index].average(
                    round, members, values[index], weight=1.0, codec=get_codec("float32")
                )

            whole = await asyncio.gather(*(average(index, 0) for index in range(3)))
            print(f"average_of_{SIZE}_by_3_s={max(outcome.wait_s for outcome in whole):.3f}")
            for outcome in whole:
                assert outcome.average is not None, outcome.reason
                assert torch.equal(outcome.average, whole[0].average)  # type: ignore[arg-type]
            assert whole[0].average is not None
            assert_sum(whole[0].average, torch.stack(values).double() / 3, 3)

            await leaving.aclose()
            rest = await asyncio.gather(*(average(index, 1) for index in range(2)))
            survivors = tuple(sorted(member.peer for member in members[:2]))
            for outcome in rest:
                assert outcome.average is not None, outcome.reason
                assert torch.equal(outcome.average, rest[0].average)  # type: ignore[arg-type]
                assert set(outcome.contributors) == {survivors}
            print(f"average_without_one_of_3_s={max(outcome.wait_s for outcome in rest):.3f}")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
