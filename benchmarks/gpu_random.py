"""Random operations for a while; every element of every result is checked on its device, against numbers that tell where they come from."""

from __future__ import annotations

import collections
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from benchmarks.gpu_programs import PLATFORM, gpu_mesh, program, store

KINDS = ("ppermute", "all_gather", "all_to_all", "pbroadcast", "psend", "precv_start", "exchange", "ragged_all_to_all")
_SHAPES = ((1, 1), (3, 33), (16, 1024), (128, 33), (16, 8192), (128, 8192))  # rows for each rank, columns; each is a program to compile
_TABLES = 2  # different ones of an irregular operation and size
_UNTOUCHED = -1


def _filled(value: int, _index: Any) -> np.ndarray:
    return np.full((1, 1), value, np.int32)


def _number(source: Any, row: Any, columns: int, start: Any) -> jax.Array:
    """int32 [rows, columns]: what `source` has in these rows of its operand (vectors, or one source)."""
    index = jnp.asarray(row, jnp.int32)[:, None] * columns + jnp.arange(columns, dtype=jnp.int32)
    return index * 7919 + jnp.reshape(jnp.asarray(source, jnp.int32), (-1, 1)) * 104729 + start


def _irregular(kind: str, size: int, rows: int, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """What an exchange or a ragged all-to-all takes, and int32 [rank, row of its result]: source (or -1: nothing comes) and row there."""
    rng = np.random.default_rng(seed)
    source, origin = np.full((size, rows), _UNTOUCHED, np.int32), np.zeros((size, rows), np.int32)
    if kind == "exchange":
        flows = []
        for dst in range(size):
            bounds = np.unique([0, *rng.integers(0, rows + 1, 2 * size), rows])
            for first, last in itertools.pairwise(bounds):
                if rng.random() < 0.2:
                    continue
                src, at = int(rng.integers(size)), int(rng.integers(rows - (last - first) + 1))
                flows.append((src, dst, at, int(first), int(last - first)))
                source[dst, first:last], origin[dst, first:last] = src, np.arange(at, at + last - first)
        return flows, source, origin
    counts = rng.integers(0, rows // size + 1, (size, size))
    starts, ends = np.cumsum(counts, axis=1) - counts, np.cumsum(counts, axis=0)
    for src in range(size):
        for dst in range(size):
            first, last = ends[src, dst] - counts[src, dst], ends[src, dst]
            source[dst, first:last], origin[dst, first:last] = src, starts[src, dst] + np.arange(last - first)
    return (starts, counts, ends - counts, counts.T), source, origin


def _make(kind: str, rows: int, columns: int, priority: Any, overlap: bool, choice: int) -> Callable[[jax.Array], jax.Array]:
    """A program that runs one operation: int32 [1, 1] a rank, added to all numbers, to how many elements of its result are wrong."""
    size = gpu_mesh().size
    ring = [(r, (r + 1) % size) for r in range(size)]
    options: dict[str, Any] = {"priority": priority, "overlap": overlap}

    def body(start: jax.Array) -> jax.Array:
        rank, every = jax.lax.axis_index("x"), jnp.arange(rows)
        mine = functools.partial(_number, columns=columns, start=start[0, 0])
        x = mine(rank, every)
        if kind == "ppermute":
            got, wanted = hoccl_jax.ppermute(x, "x", ring, **options), mine((rank - 1) % size, every)
        elif kind == "all_gather":
            got = hoccl_jax.all_gather(x, "x", **options)
            wanted = jnp.stack([mine(r, every) for r in range(size)])
        elif kind == "all_to_all":
            got = hoccl_jax.all_to_all(x, "x", 0, 0, tiled=True, **options)
            block = rows // size
            wanted = jnp.concatenate([mine(r, rank * block + jnp.arange(block)) for r in range(size)])
        elif kind == "pbroadcast":
            root = choice % size
            got, wanted = hoccl_jax.pbroadcast(x, "x", root, **options), mine(root, every)
        elif kind == "psend":
            token = hoccl_jax.psend(x, "x", ring, priority=priority)
            got = hoccl_jax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "x", ring, priority=priority)
            wanted = mine((rank - 1) % size, every)
        elif kind == "precv_start":
            future = hoccl_jax.precv_start(jax.lax.create_token(), jax.ShapeDtypeStruct(x.shape, x.dtype), "x", ring, priority=priority)
            future, x = jax.lax.optimization_barrier((future, x))
            hoccl_jax.psend_start(x, "x", ring, priority=priority).done()
            got, wanted = future.done(), mine((rank - 1) % size, every)
        else:
            arguments, source, origin = _irregular(kind, size, rows, choice)
            into = jnp.full_like(x, _UNTOUCHED)
            if kind == "exchange":
                got = hoccl_jax.exchange(x, "x", arguments, into=into, **options)
            else:
                tables = [jnp.asarray(table, jnp.int32)[rank] for table in arguments]
                got = hoccl_jax.ragged_all_to_all(x, into, *tables, axis_name="x", **options)
            comes_from, row = jnp.asarray(source)[rank], jnp.asarray(origin)[rank]
            wanted = jnp.where(comes_from[:, None] == _UNTOUCHED, _UNTOUCHED, mine(comes_from, row))
        return jnp.sum(got != wanted, dtype=jnp.int32)[None, None]

    return program(body)


def random_operations(seconds: float, seed: int) -> dict[str, Any]:
    """Runs random operations for so long, without waiting between them but for the checks' results."""
    size = gpu_mesh().size
    rng = np.random.default_rng(seed)
    programs: dict[Any, Any] = {}
    ran: collections.Counter[str] = collections.Counter()
    mismatches = 0
    end = time.monotonic() + seconds
    while True:
        # All ranks must end at the same operation: rank 0 says when.
        if jax.process_count() == 1:
            if time.monotonic() > end:
                break
        elif ran.total() % 50 == 0:
            go_on = f"gpu_worker/random/{seed}/{ran.total()}"
            if jax.process_index() == 0:
                store().key_value_set(go_on, "1" if time.monotonic() < end else "0")
            if store().blocking_key_value_get(go_on, 60_000) == "0":
                break
        kind = KINDS[rng.integers(len(KINDS))]
        rows_of_rank, columns = _SHAPES[rng.integers(len(_SHAPES))]
        priority, overlap = ("foreground", "background")[rng.integers(2)], bool(rng.integers(2))
        choice = int(rng.integers(_TABLES)) if kind in ("pbroadcast", "exchange", "ragged_all_to_all") else 0
        key = (kind, size * rows_of_rank, columns, priority, overlap, choice)
        if key not in programs:
            programs[key] = _make(*key)
        start = jax.make_array_from_callback((size, 1), NamedSharding(gpu_mesh(), P("x")), functools.partial(_filled, ran.total()))
        wrong = programs[key](start)
        mismatches += sum(int(np.asarray(shard.data).sum()) for shard in wrong.addressable_shards)
        ran[kind] += 1
    hoccl_jax.check_errors()
    return {
        "ran": dict(ran),
        "mismatches": mismatches,
        "programs": len(programs),
        "bytes_in_use": (jax.local_devices(backend=PLATFORM)[0].memory_stats() or {}).get("bytes_in_use"),
        "stats": hoccl_jax.stats(),
    }
