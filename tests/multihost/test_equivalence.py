"""Over several hosts, hoccl_jax equals jax.lax bit for bit."""

from __future__ import annotations

import pytest

from hoccl_jax.tools.hosts import Hosts, why_not
from tests.multihost.jobs import run

pytestmark = [pytest.mark.any_jax, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


@pytest.mark.parametrize(
    ("hosts", "processes_each", "schedule", "staging", "seed", "count"),
    [(2, 1, "plan", "auto", 1, 25), (2, 2, "plan", "on", 2, 12), (4, 1, "direct", "auto", 3, 10)],
)
def test_random_cases_over_hosts(hosts: int, processes_each: int, schedule: str, staging: str, seed: int, count: int) -> None:
    env = {"HOCCL_TIMEOUT_S": "60", "HOCCL_SCHEDULE": schedule, "HOCCL_NET_STAGING": staging}
    with Hosts(hosts) as connected:
        ranks = run(connected, "equivalence", str(seed), str(count), processes_each=processes_each, env=env)
    for (report,) in ranks:
        assert report == {"ran": count, "failed": {}}
