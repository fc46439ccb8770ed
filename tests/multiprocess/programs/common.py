"""What the programs of this folder share: data, meshes, waiting for each other, and reporting to the test."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_WAIT_MS = 600_000  # the deadline of the job ends what hangs; ranks with less to do than others wait long on a loaded machine

# TEST_NODES: the processes of the job play so many nodes, evenly.
if nodes := int(os.environ.get("TEST_NODES", "0")):
    os.environ["HOCCL_NODE_ID"] = str(jax.process_index() * nodes // jax.process_count())

_barriers = itertools.count()  # a barrier's name can be used once


def report(**facts: Any) -> None:
    """Tells the test something, in one write, so that output of other threads cannot split it."""
    os.write(sys.stdout.fileno(), f"\nREPORT {json.dumps(facts)}\n".encode())


def mesh_of(processes: Sequence[int], axis: str = "x") -> Mesh:
    """A mesh of all devices of these processes."""
    return Mesh(np.array([d for d in jax.devices() if d.process_index in processes]), axis)


def everyone() -> Mesh:
    return mesh_of(range(jax.process_count()))


def ranks_values(mesh: Mesh, per_rank: int, dtype: Any = np.float32) -> jax.Array:
    """A global array of `per_rank` consecutive numbers a rank."""
    values = np.arange(mesh.devices.size * per_rank).astype(dtype)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda index: values[index])


def sharded(mesh: Mesh, function: Callable[..., Any], name: str = "step", **kwargs: Any) -> Any:
    """`function` of one sharded operand, jitted. Programs of ranks that disagree have one `name`, as two versions of one source would."""
    function.__name__ = name
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), **kwargs))


def local(array: jax.Array) -> list[Any]:
    """The shards of this process."""
    return [np.asarray(shard.data).tolist() for shard in array.addressable_shards]


def attempt(step: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Runs a step to its end: `values` of this process's shards or `error`, with the time it took and the time of its end in seconds."""
    start = time.monotonic()
    try:
        outcome: dict[str, Any] = {"values": local(jax.block_until_ready(step(*args)))}
    except jax.errors.JaxRuntimeError as error:
        outcome = {"error": str(error)}
    now = time.monotonic()
    return {**outcome, "seconds": now - start, "at": now}


def _store() -> Any:
    """JAX's key-value store of the job."""
    return distributed.global_state.client


def announce(event: str) -> None:
    _store().key_value_set(f"test/{event}", "1")


def await_event(event: str) -> None:
    _store().blocking_key_value_get(f"test/{event}", _WAIT_MS)


def barrier(name: str) -> None:
    """Waits until all processes of the job are here. They must come to their barriers in the same order."""
    _store().wait_at_barrier(f"test/{name}/{next(_barriers)}", _WAIT_MS)


def leave() -> None:
    """Ends this process without the goodbyes of jax.distributed, which would wait for the dead."""
    sys.stdout.flush()
    os._exit(0)
