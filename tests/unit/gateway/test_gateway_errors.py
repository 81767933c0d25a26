"""The error responses for failures in the swarm."""

import pytest

from swarmnet.gateway.errors import RETRY_S, api_error
from swarmnet_client.batching.continuous_batching import Overloaded
from swarmnet_protocols.errors import HostsOverloaded, NoRoute, OutOfResources, SwarmnetError
from swarmnet_protocols.net.limits.resources import ResourceLimitReached


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (Overloaded(7), 503, "overloaded", "7"),
        (HostsOverloaded([(3, 9)], 11.2), 503, "overloaded", "12"),
        (NoRoute([(3, 4)]), 503, "no_route", str(RETRY_S)),
        (ResourceLimitReached("no room", 12.4), 503, "out_of_resources", "13"),
        (ResourceLimitReached("no room", 0.0), 503, "out_of_resources", "1"),
        (OutOfResources("no room"), 503, "out_of_resources", str(RETRY_S)),
        (SwarmnetError("odd"), 500, "internal_error", None),
        (ValueError("a secret"), 500, "internal_error", None),
    ],
)
def test_an_error_has_a_code_and_retry_after(
    error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    response = api_error(error)
    assert (response.status, response.code, response.headers().get("Retry-After")) == (
        status,
        code,
        retry_after,
    )
    assert "secret" not in response.message
