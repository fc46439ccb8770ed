"""What the tasks of benchmarks/gpu_worker.py share: the mesh of all devices, programs over it, data, and waiting for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PLATFORM = os.environ.get("GPU_WORKER_PLATFORM", "gpu")  # "cpu": a dry run, which checks the programs and measures nothing


def gpu_mesh() -> Mesh:
    return Mesh(np.array(jax.devices(PLATFORM)), "x")


def program(function: Callable[..., Any], **kwargs: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=gpu_mesh(), in_specs=P("x"), out_specs=P("x"), **kwargs))


def spread(rows: int, columns: int, dtype: Any = np.float32) -> jax.Array:
    """A global array of distinct small numbers; `rows` are those of one rank."""
    mesh = gpu_mesh()
    shape = (rows * mesh.size, columns)
    values = (np.arange(rows * mesh.size * columns) % 8191).astype(dtype).reshape(shape)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P("x")), lambda index: values[index])


def store() -> Any:
    """JAX's key-value store of the job."""
    return distributed.global_state.client


def barrier(name: str) -> None:
    if jax.process_count() == 1:
        return
    store().wait_at_barrier(f"gpu_worker/{name}", 120_000)
