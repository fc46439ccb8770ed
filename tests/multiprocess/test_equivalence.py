"""The random cases of tests/cases.py, with the devices spread over processes: hoccl_jax equals jax.lax bit for bit on every one of them."""

from __future__ import annotations

import pytest

from tests.multiprocess import jobs


# Each process compiles each case.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "devices", "cross_memory", "posted_bytes", "seed", "count"),
    [
        (2, 4, "auto", 4096, 1, 50),
        (4, 2, "auto", 0, 2, 30),
        pytest.param(2, 4, "off", 0, 3, 25, marks=pytest.mark.any_jax),
        pytest.param(4, 2, "off", 256, 4, 15, marks=pytest.mark.any_jax),
    ],
)
def test_random_cases_over_processes(processes: int, devices: int, cross_memory: str, posted_bytes: int, seed: int, count: int) -> None:
    env = {"HOCCL_CROSS_MEMORY": cross_memory, "HOCCL_POSTED_BYTES": str(posted_bytes), "HOCCL_TIMEOUT_S": "60"}
    ranks = jobs.run("equivalence", str(seed), str(count), processes=processes, devices=devices, env=env, deadline_s=550)
    for reports in ranks:
        (report,) = reports
        assert report["failed"] == {}
        assert report["ran"] == count
