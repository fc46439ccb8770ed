"""Over several hosts, hoccl_jax equals jax.lax bit for bit."""

from __future__ import annotations

import pytest

from tests.multihost.hosts import Hosts, run, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))


@pytest.mark.parametrize(
    ("hosts", "processes_each", "staging", "seed", "count"),
    [(2, 1, "auto", 1, 40), (2, 1, "on", 2, 20), (4, 1, "auto", 3, 20), (2, 2, "auto", 4, 20)],
)
def test_random_cases_over_hosts(hosts: int, processes_each: int, staging: str, seed: int, count: int) -> None:
    env = {"HOCCL_TIMEOUT_S": "60", "HOCCL_NET_STAGING": staging}
    with Hosts(hosts) as connected:
        ranks = run(connected, "equivalence", str(seed), str(count), processes_each=processes_each, env=env)
    for (report,) in ranks:
        assert report == {"ran": count, "failed": {}}
