"""Every test of a defence fails when the defence is switched off. ``make defences`` lists them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnet_protocols.errors import SwarmnetError
from tests.audit_defences import AUDITS
from tests.catch_up_defences import CATCH_UP
from tests.defences import Defence
from tests.dial_defences import DIALS
from tests.directory_defences import DIRECTORY
from tests.expert_defences import EXPERTS
from tests.fetch_defences import FETCHING
from tests.file_defences import FILES, HASHES, IDENTITY, STATEMENTS
from tests.flood_defences import FLOODS
from tests.gateway_defences import GATEWAY
from tests.job_defences import JOBS
from tests.limit_defences import LIMITS
from tests.local_network_defences import LOCAL_NETWORK
from tests.membership_defences import HANDSHAKE, ISSUER
from tests.overload_defences import OVERLOAD
from tests.p2pd_defences import P2PD
from tests.pylibp2p_defences import PYLIBP2P
from tests.reachability_defences import REACHABILITY
from tests.routing_defences import ROUTING
from tests.sighting_defences import SIGHTINGS
from tests.slot_defences import EVICTIONS
from tests.support.virtual_time import DeadlockError
from tests.switching_defences import SWITCHING
from tests.verifiable_defences import VERIFIABLE
from tests.web_defences import WEB
from tests.word_defences import WORDS

DEFENCES = (
    *CATCH_UP,
    *HANDSHAKE,
    *ISSUER,
    *FILES,
    *IDENTITY,
    *STATEMENTS,
    *HASHES,
    *FETCHING,
    *EXPERTS,
    *LIMITS,
    *FLOODS,
    *WEB,
    *WORDS,
    *JOBS,
    *DIRECTORY,
    *P2PD,
    *PYLIBP2P,
    *DIALS,
    *REACHABILITY,
    *LOCAL_NETWORK,
    *GATEWAY,
    *ROUTING,
    *SWITCHING,
    *SIGHTINGS,
    *EVICTIONS,
    *OVERLOAD,
    *AUDITS,
    *VERIFIABLE,
)

FAILURES = (AssertionError, pytest.fail.Exception, SwarmnetError, TimeoutError, DeadlockError)
"""The errors of a failed test. Any other error is a mistake in the table."""


@pytest.mark.parametrize("defence", DEFENCES, ids=lambda each: each.name)
def test_the_test_of_a_defence_fails_without_it(
    defence: Defence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defence.switch_off(monkeypatch)
    with pytest.raises(BaseException) as info:  # noqa: PT011 - looked at below
        defence.fails(tmp_path)
    errors = list(leaves(info.value))
    assert all(isinstance(error, FAILURES) for error in errors), errors


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error
