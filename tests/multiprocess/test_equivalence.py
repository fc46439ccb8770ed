"""The random cases of tests/cases.py, with the devices spread over processes: hoccl_jax equals jax.lax bit for bit on every one of them."""

from __future__ import annotations

import pytest

from tests.multiprocess import jobs

_CASES = 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "devices", "cross_memory", "seed"), [(2, 4, "auto", 1), (4, 2, "auto", 2), (2, 4, "off", 3), (4, 2, "off", 4)]
)
def test_random_cases_over_processes(processes: int, devices: int, cross_memory: str, seed: int) -> None:
    env = {"HOCCL_CROSS_MEMORY": cross_memory, "HOCCL_TIMEOUT_S": "60"}
    ranks = jobs.run("equivalence", str(seed), str(_CASES), processes=processes, devices=devices, env=env, deadline_s=550)
    for reports in ranks:
        (report,) = reports
        assert report["failed"] == {}
        assert report["ran"] == _CASES
