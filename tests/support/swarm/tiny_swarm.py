"""The public model facade over a swarm of tiny nodes in this process, in real time: no processes,
no sockets."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_client.hosts.runtime import Runtime
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.model import wrap
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.support.models.tiny import VOCABULARY
from tests.support.network.memory_network import LinkProfile
from tests.support.swarm.swarm_lab import Lab, Reference, load_reference

SPANS = ((0, 2), (2, 4), (4, 6))
FORM = LoadOptions()


@dataclass
class TinySwarm:
    """A swarm model, the same model whole, and the nodes of the swarm."""

    model: Any
    reference: Reference
    lab: Lab

    @contextmanager
    def another_client(self, name: str) -> Iterator[Any]:
        """The model opened by another peer, on the same loop."""
        shared: Any = self.model._runtime
        stack = AsyncExitStack()
        hosts = self.model.run(stack.enter_async_context(self.lab.client(name)))
        runtime: Any = SimpleNamespace(opened=hosts, run=shared.run, close=lambda: None)
        model = wrap(self.reference.local, runtime, FORM)
        try:
            yield model
        finally:
            self.model.run(stack.aclose())

    @property
    def status(self) -> NodeStatus:
        """The status that the first node reports."""

        async def ask() -> NodeStatus:
            return self.lab.nodes["0"].status()

        status: NodeStatus = self.model.run(ask())
        return status


def save_words(folder: Path) -> None:
    """Write a tokenizer whose words are ``w0`` to ``w96``."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w0", bos_token="w1"
    )
    tokenizer.save_pretrained(folder)


def load_tiny(directory: Path, **options: float) -> Reference:
    """The tiny Llama of ``load_reference`` with a tokenizer whose words are ``w0`` to ``w96``."""
    save_words(directory / "model")
    return load_reference(directory / "model", directory / "cache", **options)


@contextmanager
def tiny_swarm(
    reference: Reference, spans: Sequence[tuple[int, int]] = SPANS, *, labels: int | None = None
) -> Iterator[TinySwarm]:
    """A swarm with one node for each of ``spans``, and a client of it; with ``labels``, a
    classifier."""
    labs: list[Lab] = []

    @asynccontextmanager
    async def connect() -> AsyncIterator[ModelHosts]:
        async with Lab(reference, link=LinkProfile(delay_s=0.0001)) as lab:
            labs.append(lab)
            for number, span in enumerate(spans):
                await lab.start(str(number), lab.hosting(span))
            async with lab.client() as hosts:
                yield hosts

    runtime = Runtime(connect)
    with wrap(reference.local, runtime, replace(FORM, labels=labels)) as model:
        yield TinySwarm(model, reference, labs[0])
