"""Limits of clients' resources while a host's memory is limited, and after the limit is removed."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from swarmnet_node.engine.engine import Engine
from swarmnet_node.hosted_blocks import Hosting
from swarmnet_node.loading.memory_limit import Governor
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager

GIB = 1 << 30


@pytest.mark.parametrize("is_on_accelerator", [False, True])
def test_everything_is_as_before_once_the_limit_is_taken_back(is_on_accelerator: bool) -> None:
    # Adapters and caches are in the memory of an accelerator, which the limit does not count.
    elsewhere = {Resource.ADAPTER_BYTES} if is_on_accelerator else set()
    resources = ResourceManager()
    hosting = Hosting(
        model="model", manifest=bytes(32), total_blocks=4, load=lambda start, end: NotImplemented
    )
    for resource, most in (
        (Resource.LOG, hosting.limits.total_log_bytes),
        (Resource.ADAPTER_BYTES, hosting.limits.adapter_bytes),
        (Resource.PASSES, hosting.limits.passes),
    ):
        resources.limit(resource, system=most)
    caches: list[int] = []
    stage = SimpleNamespace(
        blocks=4,
        weight_bytes=GIB // 4,
        widths=LayerWidths(1024, 1024, 4096),
        dtype=torch.float32,
        is_on_accelerator=is_on_accelerator,
    )
    engine = cast(
        "Engine",
        SimpleNamespace(stage=stage, graph_cache=SimpleNamespace(nbytes=0), limit_caches=caches.append),
    )

    def limits() -> dict[Resource, int]:
        return dict(resources.system.limits)

    before = limits()
    governor = Governor(resources, hosting, bare_bytes=GIB // 4)
    governor.adjust(engine, GIB, GIB // 2)
    limited = limits()
    for resource in {Resource.MEMORY, Resource.LOG, Resource.ADAPTER_BYTES} - elsewhere:
        assert limited[resource] < before[resource]
    assert all(limited[resource] == before[resource] for resource in elsewhere)
    assert (caches[-1] < hosting.max_cache_bytes) == (not is_on_accelerator)
    governor.adjust(engine, None, GIB // 2)
    assert limits() == before
    assert caches[-1] == hosting.max_cache_bytes
