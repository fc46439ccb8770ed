"""Properties of plans, over random groups and traffic: skewed, sparse, empty, of prime sizes."""

from __future__ import annotations

import collections
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from hoccl_jax._native import sched

pytestmark = pytest.mark.any_jax

PRIMES = [1, 2, 3, 5, 7, 11, 13, 509, 1021, 65521, 1048573]

topologies = st.builds(
    lambda nodes, rails: sched.Topology.from_nodes(nodes, rails),
    st.lists(st.integers(0, 4), min_size=1, max_size=14),
    st.integers(1, 5),
)
sizes = st.one_of(st.just(0), st.sampled_from(PRIMES), st.integers(0, 1 << 22))
options = st.fixed_dictionaries(
    {"chunk_bytes": st.sampled_from([4096, 65536, 99991, 1 << 20]), "error": st.sampled_from([0.5, 0.02, 0.001])}
)


@st.composite
def matrices(draw: st.DrawFn, ranks: int) -> np.ndarray:
    """int64 [ranks, ranks]: bytes from row to column."""
    kind = draw(st.sampled_from(["any", "sparse", "skewed", "one column", "uniform"]))
    if kind == "uniform":
        return np.full((ranks, ranks), draw(sizes), np.int64)
    matrix = draw(hnp.arrays(np.int64, (ranks, ranks), elements=sizes))
    if kind == "sparse":
        matrix *= draw(hnp.arrays(np.int64, (ranks, ranks), elements=st.integers(0, 1)))
    if kind == "skewed":
        matrix[:, draw(st.integers(0, ranks - 1))] *= 16
    if kind == "one column":
        matrix[:, np.arange(ranks) != draw(st.integers(0, ranks - 1))] = 0
    return matrix


@st.composite
def traffics(draw: st.DrawFn, topology: Any) -> Any:
    ranks = topology.ranks
    if draw(st.booleans()):
        return sched.Traffic.matrix(draw(matrices(ranks)))
    sources = draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    some = st.lists(st.integers(0, ranks - 1), max_size=ranks, unique=True).map(sorted)
    return sched.Traffic.multicasts(ranks, [(src, draw(sizes), draw(some)) for src in sources])


def plan(topology: Any, traffic: Any, options: dict[str, Any]) -> Any:
    return sched.plan(topology, traffic, staging_bytes=max(1 << 20, 4 * options["chunk_bytes"]), **options)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_plans_verify(data: st.DataObject) -> None:
    topology = data.draw(topologies)
    plan(topology, data.draw(traffics(topology)), data.draw(options)).verify()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_plans_are_values(data: st.DataObject) -> None:
    topology = data.draw(topologies)
    traffic, how = data.draw(traffics(topology)), data.draw(options)
    one, other = plan(topology, traffic, how), plan(topology, traffic, how)
    assert one == other
    assert str(one) == str(other)
    assert str(one).startswith(f"plan for {topology}")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_schedule_beats_the_bound(data: st.DataObject) -> None:
    topology = data.draw(topologies)
    traffic = data.draw(traffics(topology))
    bound = sched.lower_bound(traffic, topology)
    ours = plan(topology, traffic, data.draw(options))
    assert sched.simulate(ours) >= bound
    for baseline in ("all_at_once", "rotation", "rail_aligned", "greedy"):
        if topology.rails == max(collections.Counter(topology.node_of(r) for r in range(topology.ranks)).values()):
            assert sched.simulate_baseline(baseline, traffic, topology, 1 << 20) >= bound


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_timelines_respect_the_order_of_nics(data: st.DataObject) -> None:
    topology = data.draw(topologies)
    ours = plan(topology, data.draw(traffics(topology)), data.draw(options))
    free: dict[tuple[int, int], float] = {}
    for step, (start, end) in zip(ours.steps(), sched.timeline(ours), strict=True):
        assert 0 <= start < end
        if step.leg == "write":
            nic = topology.node_of(step.from_rank), step.rail
            assert start >= free.get(nic, 0.0)
            free[nic] = start


@settings(deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: matrices(n)), st.sampled_from([0.5, 0.02, 0.001]))
def test_decomposition_serves_all_without_contention(matrix: np.ndarray, error: float) -> None:
    n = len(matrix)
    served = np.zeros_like(matrix)
    total = 0
    stages = sched.decompose(matrix, error)
    for length, matches in stages:
        rows, columns = [m[0] for m in matches], [m[1] for m in matches]
        assert len(set(rows)) == len(rows)
        assert len(set(columns)) == len(columns)
        for row, column, so_far in matches:
            assert 0 < so_far - served[row, column] <= length
            served[row, column] = so_far
        total += length
    np.testing.assert_array_equal(served, matrix)
    busiest = max(matrix.sum(0).max(), matrix.sum(1).max())
    assert busiest <= total <= (1 + error) * busiest + n
    assert len(stages) <= n * (1 + 2 / error)


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_uniform_traffic_needs_no_more_than_its_bound_and_a_little(nodes: int) -> None:
    topology = sched.Topology.uniform(nodes, 8, 8)
    ranks = topology.ranks
    traffic = sched.Traffic.matrix(np.full((ranks, ranks), (256 << 20) // ranks, np.int64))
    assert sched.simulate(sched.plan(topology, traffic)) <= 1.05 * sched.lower_bound(traffic, topology)


def test_operations_are_planned_and_cached() -> None:
    topology = sched.Topology.parse("2x2 rails=2 nvlink=200 nic=50")
    cache = sched.PlanCache(topology)
    operation = sched.Operation("all_to_all", 4, 2, [8, 1000], 0, 1)
    assert str(operation) == "all_to_all [8,1000] from axis 0 to axis 1 over 4 ranks"
    cached = cache.get(operation)
    assert cached == sched.plan(topology, sched.Traffic.of(operation))
    assert cache.get(operation) == cached
    cached.verify()


def test_errors_say_what_is_wrong() -> None:
    topology = sched.Topology.parse("2x2")
    with pytest.raises(ValueError, match="wanted"):
        sched.Topology.parse("two nodes")
    with pytest.raises(ValueError, match="not square"):
        sched.Traffic.matrix(np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError, match="negative"):
        sched.Traffic.matrix(np.full((2, 2), -1, np.int64))
    with pytest.raises(ValueError, match="3 ranks for a topology of 4"):
        sched.plan(topology, sched.Traffic.matrix(np.zeros((3, 3), np.int64)))
    with pytest.raises(ValueError, match="source of two"):
        sched.Traffic.multicasts(4, [(0, 1, []), (0, 2, [])])
    with pytest.raises(ValueError, match="unknown kind"):
        sched.Operation("reduce", 4, 2, [8])
    with pytest.raises(ValueError, match="unknown baseline"):
        sched.simulate_baseline("best", sched.Traffic.matrix(np.zeros((4, 4), np.int64)), topology, 1 << 20)
