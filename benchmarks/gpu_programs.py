"""What the tasks of benchmarks/gpu_worker.py share: the mesh of all devices, programs over it, data, waiting for each other, and
measuring."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

PLATFORM = os.environ.get("GPU_WORKER_PLATFORM", "gpu")  # "cpu": a dry run, which checks the programs and measures nothing


def gpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices(PLATFORM)), "x")


def program(function: Callable[..., Any], **kwargs: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=gpu_mesh(), in_specs=P("x"), out_specs=P("x"), **kwargs))


def spread(rows: int, columns: int, dtype: Any = np.float32) -> jax.Array:
    """A global array of distinct small numbers; `rows` are those of one rank."""

    def own() -> jax.Array:  # (row * columns + column) % 8191, by factors that 32 bits hold
        row, column = (jax.lax.broadcasted_iota(np.int32, (rows, columns), axis) for axis in (0, 1))
        row += jax.lax.axis_index("x") * rows
        return ((row % 8191 * (columns % 8191) + column % 8191) % 8191).astype(dtype)

    return jax.jit(jax.shard_map(own, mesh=gpu_mesh(), in_specs=(), out_specs=P("x")))()


def store() -> Any:
    """JAX's key-value store of the job."""
    return distributed.global_state.client


def barrier(name: str) -> None:
    if jax.process_count() == 1:
        return
    store().wait_at_barrier(f"gpu_worker/{name}", 120_000)


_exchanges = itertools.count()


def everyone(value: Any) -> list[Any]:
    """What each process brings, a value that JSON can hold, in order of the processes."""
    if jax.process_count() == 1:
        return [value]
    key = f"gpu_worker/everyone/{next(_exchanges)}"
    store().key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    return [json.loads(store().blocking_key_value_get(f"{key}/{process}", 120_000)) for process in range(jax.process_count())]


_measurements = itertools.count()


def median_us(step: Callable[[], Any], per_call: int, repeats: int = 20) -> float:
    jax.block_until_ready(step())
    jax.block_until_ready(step())
    number = next(_measurements)
    times = []
    for i in range(repeats):
        barrier(f"measurement {number}/{i}")
        start = time.perf_counter()
        jax.block_until_ready(step())
        times.append((time.perf_counter() - start) / per_call * 1e6)
    return statistics.median(times)


def gpu_events(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """What runs on this process's GPUs during one call of `step`, in order of time: name, device, start and duration in us, details."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step())
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found = []
    for event in events:
        stream = threads.get((event.get("pid"), event.get("tid")), "")
        device = processes.get(event.get("pid"), "")
        if event.get("ph") == "X" and "/device:GPU" in device and stream.startswith("Stream"):
            details = {k: v for k, v in event.get("args", {}).items() if k.endswith("_details")}
            found.append({"name": event["name"], "device": device, "stream": stream, "at": event["ts"], "us": event["dur"], **details})
    return sorted(found, key=lambda event: event["at"])
