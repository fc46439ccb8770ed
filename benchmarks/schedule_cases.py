"""What benchmarks/schedule.py measures: traffic, and its time under our plans and under the baselines, in the simulator."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from hoccl_jax._native import sched

DEVICES = 8  # a node's, each with a NIC of its own: the paper's setting
BASELINES = ("all_at_once", "rotation", "rail_aligned", "greedy")
PATTERNS = ("uniform", "zipf", "one-hot")
HARD_PATTERNS = ("zipf per source", "lognormal", "sparse")


def topology(nodes: int, rails: int = DEVICES) -> Any:
    """Nodes of 8 H800: links of 200 GB/s each way, a NIC of 50 GB/s for each device."""
    return sched.Topology.uniform(nodes, DEVICES, rails)


def h200_node(devices: int) -> Any:
    """One node of H200, with the link that a copy between two of them was measured to have: 394 GB/s of 450 nominal."""
    speeds = sched.LinkSpeeds()
    speeds.nvlink = 394e9
    return sched.Topology.uniform(1, devices, 1, speeds)


def bytes_between(pattern: str, ranks: int, bytes_of_rank: int, seed: int = 0) -> np.ndarray:
    """int64 [ranks, ranks], row = source: what each rank has for each.

    zipf: destinations are popular in proportion to 1/k, for all sources alike but for a log-normal factor (sigma 0.3), as experts are.
    one-hot: everything goes to one rank. zipf per source: every source has an order of favourites of its own. lognormal: independent, sigma
    1.5. sparse: one pair in ten, log-normal (sigma 1).
    """
    random = np.random.default_rng(seed)
    if pattern == "uniform":
        weight = np.ones((ranks, ranks))
    elif pattern == "zipf":
        weight = np.exp(random.normal(0, 0.3, (ranks, ranks)))
        weight /= 1 + random.permutation(ranks)
    elif pattern == "one-hot":
        weight = np.zeros((ranks, ranks))
        weight[:, random.integers(ranks)] = 1
    elif pattern == "zipf per source":
        weight = np.stack([1 / (1 + random.permutation(ranks)) for _ in range(ranks)])
    elif pattern == "lognormal":
        weight = np.exp(random.normal(0, 1.5, (ranks, ranks)))
    elif pattern == "sparse":
        weight = np.exp(random.normal(0, 1, (ranks, ranks))) * (random.random((ranks, ranks)) < 0.1)
    else:
        raise ValueError(f"unknown pattern {pattern!r}")
    weight *= bytes_of_rank / np.maximum(weight.sum(axis=1, keepdims=True), 1e-30)
    return weight.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Case:
    """Seconds. `baselines` of cases that are simulated by stages have no copies either, and no entry for what takes too long."""

    pattern: str
    nodes: int
    bytes_of_rank: int
    bound: float
    ours: float
    stages: int
    by_stages: bool
    baselines: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.ours / self.bound

    def baseline_ratio(self, name: str) -> float:
        return self.baselines[name] / self.bound

    @property
    def best_baseline(self) -> float:
        return min(self.baselines.values(), default=float("inf")) / self.bound


def measure(pattern: str, nodes: int, bytes_of_rank: int, by_stages: bool = False, baselines: tuple[str, ...] = BASELINES) -> Case:
    where = topology(nodes)
    traffic = sched.Traffic.matrix(bytes_between(pattern, where.ranks, bytes_of_rank))
    plan = sched.plan(where, traffic)
    return Case(
        pattern,
        nodes,
        bytes_of_rank,
        sched.lower_bound(traffic, where),
        (sched.simulate_stages if by_stages else sched.simulate)(plan),
        len(plan.stages),
        by_stages,
        {name: sched.simulate_baseline(name, traffic, where, plan.chunk_bytes, by_stages) for name in baselines},
    )


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, as the paper counts them: 1 GB is 1e9 bytes of the whole operation; bus bandwidth is that times (n - 1) / n."""

    size: int
    send: float  # one pair of ranks, one rail
    send_all_rails: float
    all_gather: float
    all_to_all: float


def paper_bandwidth(size: int) -> Bandwidth:
    """Two nodes of 8, one operation of `size` bytes at a time."""
    ranks = 2 * DEVICES
    pair = np.zeros((ranks, ranks), np.int64)
    pair[0, DEVICES] = size

    def rate(traffic: Any, rails: int = DEVICES) -> float:
        return size / sched.simulate(sched.plan(topology(2, rails), traffic))

    bus = (ranks - 1) / ranks
    blocks: list[tuple[int, int, list[int]]] = [(rank, size // ranks, []) for rank in range(ranks)]
    return Bandwidth(
        size,
        rate(sched.Traffic.matrix(pair), rails=1),
        rate(sched.Traffic.matrix(pair)),
        bus * rate(sched.Traffic.multicasts(ranks, blocks)),
        bus * rate(sched.Traffic.matrix(np.full((ranks, ranks), size // ranks, np.int64))),
    )


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Completion time over the bound: the plan, and with one thing done otherwise."""

    pattern: str
    nodes: int
    plan: float
    rotation: float
    greedy: float
    blind_copies: float


def ablate(pattern: str, nodes: int, bytes_of_rank: int) -> Ablation:
    where = topology(nodes)
    traffic = sched.Traffic.matrix(bytes_between(pattern, where.ranks, bytes_of_rank))
    bound = sched.lower_bound(traffic, where)
    plan = sched.plan(where, traffic)
    blind = max(end for _, end in sched.timeline(plan, choose_receivers=False)) + where.speeds.operation_start
    orders = [sched.simulate(sched.plan_in_order(order, where, traffic)) for order in ("rotation", "greedy")]
    return Ablation(pattern, nodes, sched.simulate(plan) / bound, orders[0] / bound, orders[1] / bound, blind / bound)


@dataclasses.dataclass(frozen=True)
class PlanningTime:
    """Seconds: the best of some repeats, since other programs only add to it."""

    pattern: str
    nodes: int
    stages: int
    seconds: float
    ratio_by_stages: float


def planning_time(pattern: str, nodes: int, bytes_of_rank: int) -> PlanningTime:
    where = topology(nodes)
    traffic = sched.Traffic.matrix(bytes_between(pattern, where.ranks, bytes_of_rank))
    best = float("inf")
    for _ in range(3 if nodes >= 1024 else 20):
        start = time.perf_counter()
        plan = sched.plan(where, traffic)
        best = min(best, time.perf_counter() - start)
    return PlanningTime(pattern, nodes, len(plan.stages), best, sched.simulate_stages(plan) / sched.lower_bound(traffic, where))


def cached_plan_seconds(nodes: int) -> float:
    """Of a look-up, with what calling it from Python costs."""
    where = topology(nodes)
    cache = sched.PlanCache(where)
    operation = sched.Operation("all_to_all", where.ranks, 2, [where.ranks, 1 << 20], 0, 1)
    cache.get(operation)
    repeats = 20000
    start = time.perf_counter()
    for _ in range(repeats):
        cache.get(operation)
    return (time.perf_counter() - start) / repeats


def copy_bandwidth(chunk_bytes: int) -> float:
    """Bytes per second of 256 MiB between two devices in chunks, with an H200's link: for comparison with measurements."""
    where = h200_node(2)
    size = 256 << 20
    plan = sched.plan(where, sched.Traffic.matrix(np.array([[0, size], [0, 0]], np.int64)), chunk_bytes=chunk_bytes)
    return size / max(end for _, end in sched.timeline(plan))
