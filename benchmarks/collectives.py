"""Times the collectives of hoccl_jax and jax.lax on the devices that this process, or this jax.distributed job, has.

`benchmarks.cpu` starts it, in one process or in several. Calls of the two alternate on the same inputs; process 0 writes the samples.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from benchmarks.memcpy import Memcpy
from benchmarks.report import Samples

_OPERATIONS = ("all_gather", "all_to_all", "ppermute")
_SMALL = 1 << 16  # bytes; up to here a sample is the mean of several calls, since one is of the order of the processes' skew
_CALLS = 10
_WARM_UP = 3

_SIZES = flags.DEFINE_list("sizes", None, "Bytes a rank: of the result for all_gather, of the operand for the others.", required=True)
_REPEATS = flags.DEFINE_integer("repeats", None, "Samples of each implementation.", lower_bound=1, required=True)
_CHOSEN = flags.DEFINE_multi_enum("operation", _OPERATIONS, _OPERATIONS, "Operations to measure; repeatable.")
_OUTPUT = flags.DEFINE_string("output", None, "Where process 0 writes the samples (JSON).", required=True)

Step = Callable[[jax.Array], jax.Array]


def jitted(library: ModuleType, operation: str, mesh: Mesh) -> Step:
    n = mesh.devices.size
    function = {
        "all_gather": functools.partial(library.all_gather, axis_name="x", tiled=True),
        "all_to_all": functools.partial(library.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True),
        "ppermute": functools.partial(library.ppermute, axis_name="x", perm=[(i, (i + 1) % n) for i in range(n)]),
    }[operation]
    return jax.jit(jax.shard_map(lambda x: function(x), mesh=mesh, in_specs=P("x"), out_specs=P("x")))


def operand(operation: str, size: int, mesh: Mesh) -> jax.Array:
    """Distinct float32 values, `size` bytes a rank (a rank's contribution to an all_gather of `size` bytes)."""
    n = mesh.devices.size
    total = size // 4 if operation == "all_gather" else n * size // 4
    if total % n or (operation == "all_to_all" and size // 4 % n):
        raise app.UsageError(f"{size} bytes don't divide among {n} ranks")
    return jax.make_array_from_callback((total,), NamedSharding(mesh, P("x")), lambda index: np.arange(total, dtype=np.float32)[index])


def check_equal(ours: jax.Array, theirs: jax.Array) -> None:
    for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
        if not np.array_equal(np.asarray(a.data), np.asarray(b.data)):
            raise SystemExit(f"hoccl_jax and jax.lax differ on {a.device}")


def timed(step: Step, x: jax.Array, calls: int) -> float:
    """Seconds a call, each awaited."""
    start = time.perf_counter()
    for _ in range(calls):
        step(x).block_until_ready()
    return (time.perf_counter() - start) / calls


def measure(operation: str, size: int, repeats: int, mesh: Mesh, barrier: Callable[[], Any]) -> Samples:
    x = operand(operation, size, mesh)
    steps = {"hoccl": jitted(hoccl_jax, operation, mesh), "lax": jitted(jax.lax, operation, mesh)}
    check_equal(steps["hoccl"](x), steps["lax"](x))
    for step in steps.values():
        timed(step, x, _WARM_UP)
    calls = _CALLS if size <= _SMALL else 1
    memcpy = Memcpy(size * mesh.devices.size) if size > _SMALL and jax.process_index() == 0 else None
    samples = Samples(operation, size, [], [], [])
    for repeat in range(repeats):
        # Each goes first every other time: whatever one leaves behind (caches, free lists, skew) falls on both alike.
        for name in list(steps)[:: 1 if repeat % 2 else -1]:
            barrier()
            getattr(samples, name).append(timed(steps[name], x, calls))
        barrier()
        if memcpy:
            samples.memcpy.append(memcpy.seconds())  # the other processes wait for us in the next barrier
    if memcpy:
        memcpy.close()
    return samples


def make_barrier(mesh: Mesh) -> Callable[[], Any]:
    """All processes begin a sample together. Within one process there is nothing to align."""
    if jax.process_count() == 1:
        return lambda: None
    ones = jax.make_array_from_callback((mesh.devices.size,), NamedSharding(mesh, P("x")), lambda index: np.ones(mesh.devices.size)[index])
    psum = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    return lambda: psum(ones).block_until_ready()


def main(argv: Sequence[str]) -> None:
    del argv
    mesh = Mesh(np.array(jax.devices()), "x")
    barrier = make_barrier(mesh)
    results = [measure(op, int(size), _REPEATS.value, mesh, barrier) for size in _SIZES.value for op in _CHOSEN.value]
    if jax.process_index() == 0:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps([dataclasses.asdict(result) for result in results]))


if __name__ == "__main__":
    app.run(main)
