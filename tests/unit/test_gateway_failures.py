"""What callers of the gateway are told of failures in the swarm."""

import pytest

from swarmnet.gateway.failures import RETRY_S, explain
from swarmnet_client.batching.continuous_batching import Busy
from swarmnet_protocols.errors import NoRoute, OutOfResources, SwarmnetError
from swarmnet_protocols.net.resources import ResourceLimitReached


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (Busy(7), 503, "overloaded", "7"),
        (NoRoute([(3, 4)]), 503, "no_route", str(RETRY_S)),
        (ResourceLimitReached("no room", 12.4), 503, "out_of_resources", "13"),
        (ResourceLimitReached("no room", 0.0), 503, "out_of_resources", "1"),
        (OutOfResources("no room"), 503, "out_of_resources", str(RETRY_S)),
        (SwarmnetError("odd"), 500, "internal_error", None),
        (ValueError("a secret"), 500, "internal_error", None),
    ],
)
def test_a_failure_says_whether_and_when_to_try_again(
    error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    said = explain(error)
    assert (said.status, said.code, said.headers().get("Retry-After")) == (status, code, retry_after)
    assert "secret" not in said.message
