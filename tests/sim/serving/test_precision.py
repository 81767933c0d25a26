"""Chains keep to hosts of one precision, and say when they cannot."""

import asyncio

from tests.support.attacks.lying_hosts import lying
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [2, 7, 1, 8]


def test_failover_stays_within_one_precision_or_reports_why_not(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all({"a1": (0, 2), "b1": (2, 4), "b2": (2, 4), "c1": (4, 6)})
        for name in "b7", "b8", "b9":
            await lab.start(name, lying(lab.hosting((2, 4)), precision="int4"))
        async with lab.client() as swarm:
            await asyncio.sleep(1.0)
            async with lab.chain(swarm) as chain:
                seen = []

                def stop_the_middle(_: int) -> None:
                    seen.append(list(chain.report.precisions))
                    lab.network.crash(chain.report.route[1][0])

                await lab.generate(chain, PROMPT, 3, stop_the_middle)
                assert seen == [["f32"], ["f32"], ["f32", "int4"]]

    simulate(reference, scenario)
