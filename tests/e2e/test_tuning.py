"""A plain PyTorch loop trains the client's parameters through the swarm: loss and gradients equal
those of local autograd."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet import AutoSwarmModelForCausalLM
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.protocol_ids import PASS, PING
from swarmnet_protocols.session.passes import MAX_POSITIONS
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.models import rounding
from tests.support.network.memory_network import Delivery
from tests.support.swarm.generation import padded
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import TinySwarm, tiny_swarm

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22], [90, 3, 90, 3, 90, 3]]
HOPS = {"1 hop": ((0, 6),), "2 hops": ((0, 3), (3, 6)), "3 hops": ((0, 2), (2, 4), (4, 6))}
PROMPTS = 4


def new_prompts(width: int) -> torch.Tensor:
    prompts = torch.randn(PROMPTS, width, generator=torch.Generator().manual_seed(3))
    return (0.5 * prompts).requires_grad_()


def prompted(model: Any, prompts: torch.Tensor, texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """A right-padded batch of texts behind trainable prompts, as arguments of ``model``."""
    batch = padded(texts, left=False)
    mask = torch.cat([torch.ones(len(texts), PROMPTS, dtype=torch.long), batch["attention_mask"]], dim=1)
    ids = torch.cat([torch.zeros(len(texts), PROMPTS, dtype=torch.long), batch["input_ids"]], dim=1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPTS] = -100
    embedded = model.get_input_embeddings()(batch["input_ids"])
    inputs = torch.cat([prompts.expand(len(texts), -1, -1), embedded], dim=1)
    return {"inputs_embeds": inputs, "attention_mask": mask, "labels": labels}


def assert_near(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    rounding.assert_near(found, expected)


@contextmanager
def trainable(*parameters: torch.Tensor) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None


@pytest.mark.parametrize("spans", HOPS.values(), ids=HOPS.keys())
def test_prompts_train_through_the_swarm_as_on_the_local_model(
    calm_reference: Reference, spans: tuple[tuple[int, int], ...]
) -> None:
    """Some steps of Adam: at each the loss and the gradient are those of the local model with the
    same prompts."""
    losses = []
    with tiny_swarm(calm_reference, spans) as running:
        prompts = new_prompts(32)
        optimizer = torch.optim.Adam([prompts], lr=0.01)
        for _ in range(4):
            local_prompts = prompts.detach().clone().requires_grad_()
            local_loss = calm_reference.model(**prompted(calm_reference.model, local_prompts, TEXTS)).loss
            local_loss.backward()

            loss = running.model(**prompted(running.model, prompts, TEXTS)).loss
            optimizer.zero_grad()
            loss.backward()
            assert_near(loss.detach(), local_loss.detach())
            assert_near(prompts.grad, local_prompts.grad)
            optimizer.step()
            losses.append(float(loss.detach()))
        assert len(running.model.last_run.route) == len(spans)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("left", [True, False], ids=["left padding", "right padding"])
def test_gradients_at_padded_inputs_equal_those_of_the_local_model(calm: TinySwarm, left: bool) -> None:
    batch = padded(TEXTS, left=left)
    mask = batch["attention_mask"]
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    leaves, losses = [], []
    for model in (calm.model, calm.reference.model):
        leaf = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        output = model(inputs_embeds=leaf, attention_mask=mask, labels=labels)
        output.loss.backward()
        leaves.append(leaf.grad)
        losses.append(output.loss.detach())
    assert_near(losses[0], losses[1])
    assert_near(leaves[0] * mask[..., None], leaves[1] * mask[..., None])
    assert not leaves[0][mask == 0].any()


def test_a_batch_of_padding_only_is_not_sent(calm: TinySwarm) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    leaf = calm.model.get_input_embeddings()(ids).detach().requires_grad_()
    sent = calm.model.traffic.sent
    output = calm.model(inputs_embeds=leaf, attention_mask=torch.zeros_like(ids))
    output.logits.sum().backward()
    with torch.no_grad():
        plain = calm.model(input_ids=ids, attention_mask=torch.zeros_like(ids))
    assert leaf.grad is not None
    assert not leaf.grad.any()
    assert torch.equal(output.logits.detach(), plain.logits)
    assert calm.model.traffic.sent - sent < leaf.nbytes  # pings


def test_the_clients_own_head_and_norm_get_their_gradients(calm: TinySwarm) -> None:
    gradients = []
    for model in (calm.model, calm.reference.model):
        with trainable(model.lm_head.weight, model.model.norm.weight):
            ids = torch.tensor(TEXTS[:1])
            model.train()
            model(ids, labels=ids).loss.backward()
            model.eval()
            gradients.append((model.lm_head.weight.grad.clone(), model.model.norm.weight.grad.clone()))
    for ours, theirs in zip(*gradients, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("wanted", [True, False], ids=["at the inputs", "of the head alone"])
def test_hosts_keep_graphs_where_gradients_will_be_asked_for(calm: TinySwarm, wanted: bool) -> None:
    kept: list[bool] = []

    def watch(delivery: Delivery) -> None:
        if delivery.protocol.id == PASS.id:
            request = pb.PassRequest.FromString(delivery.message.header)
            if request.begin.counts:
                kept.append(bool(request.begin.graph))

    model = calm.model
    ids = torch.tensor(TEXTS[:1])
    calm.lab.network.observers.append(watch)
    with trainable(model.get_input_embeddings().weight if wanted else model.lm_head.weight):
        model.train()
        model(ids, labels=ids)
        model.eval()
    calm.lab.network.observers.remove(watch)
    assert kept
    assert set(kept) == {wanted}


def test_a_training_step_opens_no_session(calm: TinySwarm) -> None:
    ids = torch.tensor(TEXTS[:1])
    protocols: set[str] = set()

    def watch(delivery: Delivery) -> None:
        protocols.add(delivery.protocol.id)

    calm.lab.network.observers.append(watch)
    with trainable(calm.model.get_input_embeddings().weight):
        output = calm.model(ids, labels=ids)
        output.loss.backward()
        assert calm.model.get_input_embeddings().weight.grad.any()
    calm.lab.network.observers.remove(watch)
    assert output.past_key_values is None
    assert protocols - {PING.id} == {PASS.id}


def test_gradients_may_be_asked_for_twice(calm: TinySwarm) -> None:
    prompts = new_prompts(32)
    loss = calm.model(**prompted(calm.model, prompts, TEXTS)).loss
    (once,) = torch.autograd.grad(loss, prompts, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, prompts)
    assert_near(twice, once)


def test_operations_without_gradients_are_named(calm: TinySwarm) -> None:
    model = calm.model
    embedded = model.get_input_embeddings()(torch.tensor(TEXTS[:1])).requires_grad_()
    with pytest.raises(ValueError, match="position_ids"):
        model(inputs_embeds=embedded, position_ids=torch.tensor([[0, 1, 2, 3, 3, 4, 5, 6]]))
    long = torch.zeros(1, MAX_POSITIONS + 1, 32, requires_grad=True)
    with pytest.raises(OutOfResources, match=str(MAX_POSITIONS + 1)):
        model(inputs_embeds=long)
    with model.session() as cache, pytest.raises(ValueError, match="session"):
        model(inputs_embeds=embedded, past_key_values=cache)


def test_the_example_in_the_page_on_tuning_runs(
    calm_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    _, _, example, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    with tiny_swarm(calm_reference) as running:
        monkeypatch.setattr(AutoSwarmModelForCausalLM, "from_pretrained", lambda *_, **__: running.model)
        exec(example, names)
    assert names["loss"].isfinite()
    assert names["prompts"].grad is None
    assert names["optimizer"].state[names["prompts"]]["step"] == 20
