"""What others may hold of a host whose memory is limited, and what is left of that when it no longer is."""

from types import SimpleNamespace
from typing import cast

from swarmnet_node.engine.engine import Engine
from swarmnet_node.node import Hosting
from swarmnet_node.owner.governor import Governor
from swarmnet_protocols.net.resources import ResourceManager, Stock

GIB = 1 << 30


def test_everything_is_as_before_once_the_limit_is_taken_back() -> None:
    resources = ResourceManager()
    hosting = Hosting("model", bytes(32), 4, lambda start, end: NotImplemented)
    for stock, most in (
        (Stock.LOG, hosting.limits.log_bytes_in_all),
        (Stock.ADAPTER_BYTES, hosting.limits.adapter_bytes),
        (Stock.PASSES, hosting.limits.passes),
    ):
        resources.limit(stock, in_all=most)
    caches: list[int] = []
    stage = SimpleNamespace(blocks=4, weight_bytes=GIB // 4, hidden_size=1024)
    engine = cast(
        "Engine",
        SimpleNamespace(stage=stage, graphs=SimpleNamespace(nbytes=0), limit_caches=caches.append),
    )

    def limits() -> dict[Stock, int | None]:
        return {stock: account.in_all for stock, account in resources.snapshot().stocks.items()}

    before = limits()
    governor = Governor(resources, hosting, fixed_bytes=GIB // 2)
    governor.look(engine, GIB, GIB // 2)
    limited = limits()
    for stock in (Stock.MEMORY, Stock.LOG, Stock.ADAPTER_BYTES):
        assert cast("int", limited[stock]) < cast("int", before[stock])
    assert caches[-1] < hosting.max_cache_bytes
    governor.look(engine, None, GIB // 2)
    assert limits() == before
    assert caches[-1] == hosting.max_cache_bytes
