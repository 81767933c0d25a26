"""Hosts that give wrong outputs, finite ones, in a swarm of real nodes: they are found and
replaced, and no honest host is accused."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmnet_client.audit import plan, verdict
from swarmnet_client.audit.verdict import Verdict
from swarmnet_client.chain import auditor, repair
from swarmnet_client.chain.auditor import Auditor
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.session.activation_log import ActivationLog
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.received_digests import ReceivedDigests
from swarmnet_protocols.session.steps import Row
from tests.defences import Patch, defence, nothing, replacing
from tests.support.attacks.forgers import FORGERS, Forger, towards
from tests.support.attacks.lying_hosts import PROMPT, STEPS, THREE_OF_EACH, lying, names, start, used
from tests.support.compiled import compiled_backend
from tests.support.models.tiny_models import save_tiny
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

POSITIONS = STEPS + len(PROMPT)


async def never(self: object) -> None:
    """Audit nothing."""


@defence(
    "the outputs that hops send are computed again by others",
    off=replacing(Auditor, "run", never),
    liar="b1",
    lie="rolled",
)
@pytest.mark.matrix
@pytest.mark.parametrize("lie", ["rolled", "one_huge_channel", "a_large_channel", "scaled", "negated"])
@pytest.mark.parametrize("liar", ["a1", "b1", "c1"], ids=["first", "middle", "last"])
def test_a_host_of_a_chain_with_wrong_outputs_is_found_in_200_steps(
    reference: Reference, liar: str, lie: str
) -> None:
    """``tests/properties/test_audit.py`` has all forgers."""

    async def scenario(lab: Lab) -> None:
        await start(lab, THREE_OF_EACH, [liar], FORGERS[lie])

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert names(lab, chain.report.wrong) == [liar]
            assert lab.peer_id(liar) not in [host.peer for host in swarm.known]
            assert lab.peer_id(liar) not in [peer for peer, _, _ in chain.report.route]

        await used(lab, [liar], look)

    simulate(reference, scenario)


def nobody_is_accused(swarm: ModelHosts, chain: Chain) -> None:
    assert chain.report.audits
    assert not chain.report.wrong
    assert not swarm.ledger.doubted


def judge_unread(*outputs: Any, read: object) -> Verdict:
    del read
    return verdict.judge(*outputs)


@defence("the last hop's outputs are compared as logits, too", off=replacing(auditor, "judge", judge_unread))
def test_a_last_hop_that_favours_one_token_is_found_by_its_logits(reference: Reference) -> None:
    """Its hidden states are as near to the true ones as those of an honest host may be."""
    lie = towards(reference.model.lm_head.weight[5], 0.3)

    async def scenario(lab: Lab) -> None:
        await start(lab, THREE_OF_EACH, ["c1"], lie)

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert names(lab, chain.report.wrong) == ["c1"]

        await used(lab, ["c1"], look)

    simulate(reference, scenario)


@defence(
    "the last hop returns outputs that no row asked for",
    off=replacing(Auditor, "add_audited_outputs", lambda _, rows: rows),
)
def test_the_last_hop_returns_outputs_of_first_positions() -> None:
    """Outputs of the last hop reach only the client, and a prompt wants only its last one: audits
    need some of the first positions too."""
    spec = ChainSpec(6, 32, 512, ElementType.FLOAT32)
    swarm: Any = SimpleNamespace(ledger=None)
    auditor = Auditor(swarm, spec, swarm, ChainReport(), lambda values: values)
    rows = (Row(0, 0, 40, 1, 0), Row(1, 0, 2, 1, 1), Row(2, 9, 40, 1, 2))
    assert [row.first for row in auditor.add_audited_outputs(rows)] == [4, 1, 0]


@defence("a convicted host is not used", off=replacing(ModelHosts, "convict", nothing))
def test_a_convicted_host_is_not_used_even_if_it_is_the_only_one(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, {"a1": (0, 6), "a2": (0, 6)})
        async with lab.client() as swarm:
            await asyncio.sleep(1.0)
            for name in "a1", "a2":
                swarm.convict(lab.peer_id(name))
            await swarm.refresh()
            assert not swarm.known

    simulate(reference, scenario)


@pytest.mark.parametrize("number", range(3))
def test_honest_hosts_are_audited_and_not_accused(reference: Reference, number: int) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start(lab, THREE_OF_EACH)

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.audits >= 3
            assert not chain.report.wrong
            assert chain.report.failovers == 0
            assert not swarm.banned
            assert swarm.ledger._credit >= 0

        return await used(lab, (), look)

    assert simulate(reference, scenario, seed=number) == reference.greedy(PROMPT, STEPS)


def witnesses_of_any_precision(patch: Patch) -> None:
    def witnesses(hosts: Sequence[HostInfo], audited: Hop, *rest: Any) -> list[Hop]:
        alike = [dataclasses.replace(host, precision=audited.precision) for host in hosts]
        return plan.witnesses(alike, audited, *rest)

    patch.setattr(auditor, "witnesses", witnesses)


@defence("hosts of different precision do not audit each other", off=witnesses_of_any_precision)
def test_hosts_of_another_precision_neither_accuse_nor_are_accused(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await start(lab, THREE_OF_EACH)
        for name in "b8", "b9":
            await lab.start(name, lying(lab.hosting((2, 4)), precision="int4"))

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.precisions == ["f32", "int4"]
            nobody_is_accused(swarm, chain)

        await used(lab, ["a1", "b8", "c1"], look)

    simulate(reference, scenario)


def believe_the_second(said: Array, second: Array, third: Any = (), **_options: object) -> Verdict:
    return Verdict.RIGHT if (verdict.distances(said, second) <= 1).all() else Verdict.WRONG


@defence(
    "a third host decides between two that differ",
    off=replacing(auditor, "judge", believe_the_second),
    liar="b2",
)
@pytest.mark.parametrize("liar", ["a2", "b2", "c2"])
def test_a_lying_witness_convicts_no_honest_host(reference: Reference, liar: str) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start(lab, THREE_OF_EACH, [liar])

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.audits
            assert not chain.report.wrong
            assert not swarm.banned

        return await used(lab, ["a1", "b1", "c1"], look)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, STEPS)


@defence(
    "two hops must agree on the activations between them",
    off=replacing(Auditor, "_disagree", nothing),
    framing="c1",
)
@pytest.mark.parametrize("framing", ["a1", "c1"], ids=["upstream", "downstream"])
def test_a_host_that_lies_about_activations_convicts_no_neighbour(
    reference: Reference, framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start(lab, THREE_OF_EACH)
        digest = ReceivedDigests.digest
        liar = lab.nodes[framing]

        def lie(received: ReceivedDigests, sequence: int, count: int) -> bytes:
            mine = [session._received for session in liar.host.sessions]
            return bytes(32) if received in mine else digest(received, sequence, count)

        values = ActivationLog.values

        def forge(log: ActivationLog, sequence: int, count: int) -> Any:
            found = values(log, sequence, count)
            mine = [session._outbox.log for session in liar.host.sessions]
            return found + 1 if log in mine and found is not None else found

        if framing == "c1":
            monkeypatch.setattr(ReceivedDigests, "digest", lie)
        else:
            monkeypatch.setattr(ActivationLog, "values", forge)

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert not chain.report.wrong
            assert chain.report.failovers  # neither goes on beside the other

        return await used(lab, ["a1", "b1", "c1"], look)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, STEPS)


def inexact(error: float) -> Forger:
    """Outputs of ill-conditioned blocks, by a host that rounds with a relative ``error``."""
    return lambda outputs: torch.sin(300 * (1 + error) * outputs / outputs.abs().mean(dim=-1, keepdim=True))


@defence(
    "a third host gets nudged inputs",
    off=replacing(auditor, "nudged", lambda inputs, seed: (inputs, inputs)),
)
def test_an_honest_host_of_another_kind_is_not_accused(reference: Reference) -> None:
    """Any rounding changes the outputs of its blocks much. Both witnesses round alike."""

    async def scenario(lab: Lab) -> None:
        for name, span in THREE_OF_EACH.items():
            hosting = lab.hosting(span)
            kind = inexact(2**-8 if name == "b1" else 0.0)
            await lab.start(name, lying(hosting, kind) if span == (2, 4) else hosting)

        await used(lab, ["a1", "b1", "c1"], nobody_is_accused)

    simulate(reference, scenario)


def test_without_another_host_nothing_is_audited_and_nothing_fails(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start(lab, {"a1": (0, 2), "b1": (2, 4), "c1": (4, 6)})

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.audits == 0
            assert chain.report.failovers == 0

        return await used(lab, (), look)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, STEPS)


@defence(
    "a host that does not answer an audit is replaced",
    off=replacing(repair.ChainRepair, "fail", nothing),
)
def test_a_host_that_does_not_report_its_outputs_is_replaced(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await start(lab, THREE_OF_EACH)
        digest = ReceivedDigests.digest
        silent = lab.nodes["b1"]
        monkeypatch.setattr(
            ReceivedDigests,
            "digest",
            lambda received, sequence, count: (
                b""
                if received in [session._received for session in silent.host.sessions]
                else digest(received, sequence, count)
            ),
        )

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert not chain.report.wrong
            assert "b1" not in names(lab, [peer for peer, _, _ in chain.report.route])

        return await used(lab, ["a1", "b1", "c1"], look)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, STEPS)


@pytest.fixture(scope="module")
def exact(reference: Reference) -> Callable[[int, int], Stage]:
    return exact_stages(reference.local)


def exact_stages(model: LocalModel) -> Callable[[int, int], Stage]:
    """Return a function that loads stages of exact arithmetic. Hosts of one span share a stage."""
    native = compiled_backend()

    @cache
    def load(start: int, end: int) -> Stage:
        return load_stage(
            *(model, start, end),
            dtype=torch.float32,
            device=torch.device("cpu"),
            backend=native,
            packed=True,
            quantized=PRECISIONS["int8"],
        )

    return load


async def start_exact(
    lab: Lab, exact: Callable[[int, int], Stage], liars: Sequence[str], arithmetic: str | None = None
) -> None:
    """Start hosts of exact arithmetic. The ``liars`` lie a little, and announce ``arithmetic``."""
    for name, span in THREE_OF_EACH.items():
        hosting = dataclasses.replace(lab.hosting(span), load=exact)
        lie = a_little if name in liars else None
        await lab.start(name, hosting if lie is None else lying(hosting, lie, arithmetic=arithmetic))


def a_little(outputs: torch.Tensor) -> torch.Tensor:
    """Outputs that are as near to the true ones as those of many an honest host."""
    return outputs * (1 + 2.0**-12)


@defence(
    "outputs of hosts of exact arithmetic are compared bit for bit",
    off=replacing(auditor, "EXACT", "none"),
    liar="b1",
)
@pytest.mark.parametrize(
    ("liar", "wire"),
    [("b1", None), ("a1", None), ("c1", None), ("c1", ElementType.INT8)],
    ids=["middle", "first", "last", "last behind 8 bits"],
)
def test_exact_arithmetic_leaves_no_room_for_small_lies(
    reference: Reference, exact: Callable[[int, int], Stage], liar: str, wire: ElementType | None
) -> None:
    async def scenario(lab: Lab) -> None:
        await start_exact(lab, exact, [liar])

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert names(lab, chain.report.wrong) == [liar]

        await used(lab, [liar], look)

    simulate(reference, scenario, wire=wire)


def test_a_small_lie_about_one_weight_of_one_expert_convicts(tmp_path: Path) -> None:
    """Mixtures of experts are exact, too: one weight of block 2 differs by a thousandth."""
    models = []
    for name in ("model", "forged"):
        folder = save_tiny("mixtral", tmp_path / name, num_hidden_layers=6)
        if name == "forged":
            file = folder / "model.safetensors"
            tensors = load_file(file)
            [weight] = [each for each in tensors if ".layers.2." in each and ".experts.1.w1." in each]
            tensors[weight][0, 0] += 2.0**-10
            save_file(tensors, file, {"format": "pt"})
        models.append(resolve(str(folder), cache_dir=tmp_path / "cache"))
    honest, forged = map(exact_stages, models)

    async def scenario(lab: Lab) -> None:
        for name, span in THREE_OF_EACH.items():
            load = forged if name == "b1" else honest
            await lab.start(name, dataclasses.replace(lab.hosting(span), load=load))

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert names(lab, chain.report.wrong) == ["b1"]

        await used(lab, ["b1"], look)

    simulate(Reference(models[0]), scenario)


def believe_the_second_exactly(said: Array, second: Array, third: Sequence[Array] = ()) -> Verdict:
    return Verdict.RIGHT if np.array_equal(said, second) else Verdict.WRONG


@defence(
    "a third host decides between two of exact arithmetic",
    off=replacing(auditor, "judge_exactly", believe_the_second_exactly),
)
@pytest.mark.parametrize("wire", [None, ElementType.INT8], ids=["float32", "8 bits"])
def test_a_witness_that_lies_a_little_convicts_no_honest_host(
    reference: Reference, exact: Callable[[int, int], Stage], wire: ElementType | None
) -> None:
    async def scenario(lab: Lab) -> None:
        await start_exact(lab, exact, ["b2"])

        def look(swarm: ModelHosts, chain: Chain) -> None:
            assert chain.report.audits
            assert not chain.report.wrong
            assert swarm.ledger.doubted <= {lab.peer_id("b2")}

        await used(lab, ["a1", "b1", "c1"], look)

    simulate(reference, scenario, wire=wire)


def witnesses_of_any_arithmetic(hosts: Any, audited: Any, without: Any, rng: Any, *_: Any) -> list[Hop]:
    return plan.witnesses(hosts, audited, without, rng)


@defence(
    "only hosts of exact arithmetic are compared bit for bit",
    off=replacing(auditor, "witnesses", witnesses_of_any_arithmetic),
    others=("b2", "b3"),
)
@pytest.mark.parametrize("others", [("b1",), ("b2", "b3"), ("b1", "b2"), ("b3",)])
def test_hosts_that_round_otherwise_are_neither_accused_nor_accuse(
    reference: Reference, exact: Callable[[int, int], Stage], others: tuple[str, ...]
) -> None:
    """Torch rounds otherwise than exact arithmetic, and says so."""

    async def scenario(lab: Lab) -> None:
        await start_exact(lab, exact, others, arithmetic="torch")

        await used(lab, ["a1", "b1", "c1"], nobody_is_accused)

    simulate(reference, scenario)
