"""What benchmarks/schedule.py measures is what it says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import schedule_cases as cases

pytestmark = pytest.mark.any_jax

RANKS, BYTES = 24, 1 << 24


@pytest.mark.parametrize("pattern", [*cases.PATTERNS, *cases.HARD_PATTERNS])
def test_every_rank_sends_its_bytes(pattern: str) -> None:
    matrix = cases.bytes_between(pattern, RANKS, BYTES)
    assert matrix.dtype == np.int64
    assert (matrix >= 0).all()
    sends = matrix.sum(axis=1)
    assert ((sends == 0) | (abs(sends - BYTES) <= RANKS)).all()  # rounding; a sparse row may be empty
    np.testing.assert_array_equal(matrix, cases.bytes_between(pattern, RANKS, BYTES))


def test_patterns_are_as_skewed_as_they_say() -> None:
    def busiest(pattern: str) -> float:
        return cases.bytes_between(pattern, RANKS, BYTES).sum(axis=0).max() / BYTES

    assert busiest("uniform") == pytest.approx(1, abs=1e-4)
    assert busiest("zipf") > 4
    assert busiest("one-hot") == pytest.approx(RANKS)
    assert (cases.bytes_between("sparse", RANKS, BYTES) == 0).mean() > 0.8


@pytest.mark.parametrize("by_stages", [False, True])
def test_cases_compare_with_all_baselines(by_stages: bool) -> None:
    case = cases.measure("uniform", 3, BYTES, by_stages)
    assert case.ratio >= 1
    assert set(case.baselines) == set(cases.BASELINES)
    assert case.best_baseline == min(case.baseline_ratio(name) for name in cases.BASELINES) >= 1


@pytest.mark.parametrize("mib", [1, 4, 16])
@pytest.mark.parametrize("pattern", [*cases.PATTERNS, *cases.HARD_PATTERNS])
def test_no_baseline_is_better_for_small_traffic(pattern: str, mib: int) -> None:
    case = cases.measure(pattern, 8, mib << 20)
    assert case.ratio <= case.best_baseline


@pytest.mark.parametrize("pattern", ["zipf per source", "lognormal"])
def test_hard_traffic_comes_near_the_bound(pattern: str) -> None:
    assert cases.measure(pattern, 8, 1 << 30, baselines=()).ratio <= 1.045


def test_simulated_copies_are_near_the_measured_ones() -> None:
    for mib, measured in ((1, 279e9), (2, 343e9), (4, 369e9), (8, 380e9)):
        assert cases.copy_bandwidth(mib << 20) == pytest.approx(measured, rel=0.06)


def test_unknown_traffic_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown pattern"):
        cases.bytes_between("worst", RANKS, BYTES)
