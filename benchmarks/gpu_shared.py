"""Transfers beside computation and beside other transfers: tasks of benchmarks/gpu_worker.py, also for processes that share a GPU."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from benchmarks.gpu_programs import PLATFORM, barrier, everyone, gpu_events, gpu_mesh, median_us
from benchmarks.peer_copy import Driver, Gpu

_ROUNDS = 3  # in turns, after one that does not count
_CHUNK = 8 << 20  # HOCCL_DMA_CHUNK_BYTES' default


def _ring() -> list[tuple[int, int]]:
    size = gpu_mesh().size
    return [(rank, (rank + 1) % size) for rank in range(size)]


def _mapped(function: Callable[..., Any], inputs: int) -> Any:
    return jax.jit(jax.shard_map(function, mesh=gpu_mesh(), in_specs=(P("x"),) * inputs, out_specs=P("x")))


def _ones(rows: int, columns: int, dtype: Any) -> jax.Array:
    """`rows` are a rank's."""
    mesh = gpu_mesh()
    shape = (mesh.size * rows, columns)
    return jax.jit(lambda: jnp.full(shape, 0.5, dtype), out_shardings=NamedSharding(mesh, P("x")))()


class BareCopies:
    """Copies of `size` bytes within a GPU, by the driver alone, in a stream of its own."""

    def __init__(self, driver: Driver, ordinal: int, size: int):
        self._size = size
        self._gpu = Gpu(driver, ordinal, size, size)

    def start(self) -> None:
        self._gpu.push(self._gpu, self._size, 1)

    def wait(self) -> float:
        return self._gpu.elapsed_us()

    def free(self) -> None:
        self._gpu.free()


def _beside_bare(copies: BareCopies, step: Callable[[], Any], name: str) -> tuple[float, float]:
    """us of the step that begins with the copy, and of the copy."""
    barrier(name)
    start = time.perf_counter()
    copies.start()
    jax.block_until_ready(step())
    us = (time.perf_counter() - start) * 1e6
    return us, copies.wait()


def overlapped(size: int, moved: int) -> dict[str, Any]:
    """Products of size x size matrices and a ppermute of `moved` bytes, together and apart. All ranks work at the same time.

    The number of products is chosen such that they take 1.1 times as long as the transfer. Ratios are times over the longer of both alone.
    """
    ring = _ring()
    weights = _ones(size, size, jnp.bfloat16)
    x = _ones(1024, moved // 4096, jnp.float32)

    def gemms(count: int, w: jax.Array) -> jax.Array:
        y = w
        for _ in range(count):
            y = (y @ w) * jnp.bfloat16(0.001)
        return y

    transfer = _mapped(lambda x: hoccl_jax.ppermute(x, "x", ring, overlap=False), 1)
    few = _mapped(functools.partial(gemms, 10), 1)
    transfer_us = median_us(lambda: transfer(x), 1, 7)
    product_us = median_us(lambda: few(weights), 10, 7)
    count = everyone(min(200, max(1, math.ceil(1.1 * transfer_us / product_us))))[0]
    compute = functools.partial(gemms, count)

    def apart(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        received = hoccl_jax.ppermute_start(x, "x", ring).done()
        received, w = hoccl_jax.prefetch_barrier(received, w)
        return received, compute(w)

    def plain(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        received = hoccl_jax.ppermute(x, "x", ring, overlap=False)
        received, w = hoccl_jax.prefetch_barrier(received, w)
        return received, compute(w)

    def halves(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return hoccl_jax.overlap(hoccl_jax.ppermute_start(x, "x", ring), compute, w)

    programs: dict[str, Callable[[], Any]] = {
        "products": functools.partial(_mapped(compute, 1), weights),
        "transfer": functools.partial(transfer, x),
        "start, products, done": functools.partial(_mapped(halves, 2), x, weights),
        "start and done, then products": functools.partial(_mapped(apart, 2), x, weights),
        "overlap=False, then products": functools.partial(_mapped(plain, 2), x, weights),
    }
    copies, why = None, "a dry run"
    if PLATFORM != "cpu":
        try:
            copies = BareCopies(Driver(), gpu_mesh().local_devices[0].local_hardware_id or 0, moved)
        except (RuntimeError, OSError) as error:
            why = str(error)
    missing = [each for each in everyone("" if copies else why) if each]
    times: dict[str, list[float]] = collections.defaultdict(list)
    for turn in range(_ROUNDS + 1):
        for name, step in programs.items():
            us = median_us(step, 1, 5)
            if turn > 0:
                times[name].append(us)
        if copies and not missing:
            for repeat in range(5):
                us, copy_us = _beside_bare(copies, programs["products"], f"bare {turn}/{repeat}")
                if turn > 0:
                    times["products beside a bare copy"].append(us)
                    times["bare copy beside products"].append(copy_us)
    if copies:
        copies.free()
    hoccl_jax.check_errors()
    medians = {name: statistics.median(values) for name, values in times.items()}
    longer = max(medians["products"], medians["transfer"])
    together = ("start, products, done", "start and done, then products", "overlap=False, then products")
    result: dict[str, Any] = {"products in the program": count, "us": {name: round(us, 1) for name, us in medians.items()}}
    result["total over the longer of both"] = {name: round(medians[name] / longer, 4) for name in together}
    slowdowns = {"beside hoccl_jax": medians["start, products, done"] / medians["products"] - 1}
    if bare := medians.get("products beside a bare copy"):
        slowdowns["beside a bare copy"] = bare / medians["products"] - 1
        slowdowns["difference"] = slowdowns["beside hoccl_jax"] - slowdowns["beside a bare copy"]
    result["products' slowdown, %"] = {name: round(100 * value, 2) for name, value in slowdowns.items()}
    return result if copies and not missing else {**result, "no bare copies": (missing or [why])[0]}


def _intervals(step: Callable[[], Any], size: int, name: str) -> dict[str, Any]:
    """From the profiler: us from one copy of `size` bytes to the next, median, while longer copies run and without any.

    Further, where there are longer copies: how many small ones began before the first of these, until the end of the last, and after.
    """

    def together() -> Any:
        barrier(name)
        return step()

    copies = []
    try:
        events = gpu_events(together)
    except Exception as error:  # a profiler that can't start must not take the other figures with it
        return {"failed": str(error)[-500:]}
    for event in events:
        found = re.search(r"size:(\d+)", str(event.get("memcpy_details", "")))
        if found:
            copies.append((int(found[1]), event["at"], event["us"]))
    long = [(at, at + us) for bytes_, at, us in copies if bytes_ > 4 * size]
    begin, end = (min(at for at, _ in long), max(to for _, to in long)) if long else (math.inf, -math.inf)
    starts = [at for bytes_, at, _ in copies if bytes_ == size]
    found_intervals: dict[bool, list[float]] = {True: [], False: []}
    for one, following in itertools.pairwise(starts):
        found_intervals[begin <= one and following <= end].append(following - one)
    result: dict[str, Any] = {
        key: {"us": round(statistics.median(values), 1), "count": len(values)} if values else None
        for key, values in (("beside", found_intervals[True]), ("alone", found_intervals[False]))
    }
    if long:
        result["begun before, during, after the background"] = [
            sum(at < begin for at in starts),
            sum(begin <= at <= end for at in starts),
            sum(at > end for at in starts),
        ]
    return result


Function = Callable[..., Any]


def beside_background(ring: Sequence[tuple[int, int]], chain: int, count: int) -> tuple[Function, Function]:
    """(small -> `chain` ppermutes in a row, (small, x) -> the same between start and done of `count` background ppermutes of x).

    That the second one's chain really stands between all starts and all dones in XLA's schedule, tests/aot checks.
    """

    def permutes(small: jax.Array) -> jax.Array:
        for _ in range(chain):
            small = hoccl_jax.ppermute(small, "x", ring, overlap=False)
        return small

    def both(small: jax.Array, x: jax.Array) -> Any:
        futures = [hoccl_jax.ppermute_start(x, "x", ring, priority="background") for _ in range(count)]
        return hoccl_jax.overlap(futures, permutes, small)

    return permutes, both


def scheduled(text: str) -> list[str]:
    """hoccl_jax's calls in a compiled module's entry, in the order of their execution: ["hoccl_start 1", "hoccl_collective 50", ...]."""
    calls = re.findall(r'custom_call_target="(hoccl_\w+)"', text[text.index("\nENTRY ") :])
    return [f"{target} {len(list(run))}" for target, run in itertools.groupby(calls)]


def priorities(size: int, moved: int, chain: int) -> dict[str, Any]:
    """Latency of a small foreground ppermute, `size` bytes, while background ppermutes of `moved` bytes each saturate the GPU.

    `chain` small ones that depend on each other run alone and beside as many background ones as take longer than all of them. Their rate
    beside is read from the profiler's copies, since the program as a whole ends with the longer of both. The result also has XLA's schedule
    and how many small copies really began during the background's: the rate of a few says nothing.
    """
    ring = _ring()
    small = _ones(1, size // 4, jnp.float32)
    x = _ones(1024, moved // 4096, jnp.float32)

    def background(x: jax.Array) -> jax.Array:
        return hoccl_jax.ppermute_start(x, "x", ring, priority="background").done()

    alone, one = _mapped(beside_background(ring, chain, 0)[0], 1), _mapped(background, 1)
    alone_us = median_us(lambda: alone(small), 1, 7)
    background_us = median_us(lambda: one(x), 1, 7)
    count = everyone(min(8, max(1, math.ceil(1.5 * alone_us / background_us))))[0]
    together = _mapped(beside_background(ring, chain, count)[1], 2).lower(small, x).compile()
    total_us = median_us(lambda: together(small, x), 1, 7)
    chunk_us = background_us * min(1.0, _CHUNK / moved)
    result = {
        "idle us": round(alone_us / chain, 1),
        "background us": round(background_us, 1),
        "background transfers": count,
        "chain and background us": round(total_us, 1),
        "XLA's schedule": scheduled(together.as_text() or ""),
        "one chunk us": round(chunk_us, 1),
        "allowed us": round(1.5 * alone_us / chain + chunk_us, 1),
        "profiled idle": _intervals(lambda: alone(small), size, "events alone"),
        "profiled beside": _intervals(lambda: together(small, x), size, "events together"),
        "held": hoccl_jax.stats()["background"],
    }
    hoccl_jax.check_errors()
    return result
