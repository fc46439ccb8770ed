"""Programs of users on GPUs, checked against references: tasks of benchmarks/gpu_worker.py, also for processes that share a GPU."""

from __future__ import annotations

import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from benchmarks.gpu_programs import PLATFORM
from examples import mixture_of_experts as moe
from tests import resharding


def reshardings(seed: int, count: int) -> dict[str, Any]:
    """Random reshardings and their gradients, against JAX's own."""
    devices = jax.device_count(PLATFORM)
    failed: dict[str, str] = {}
    for i in range(seed, seed + count):
        try:
            resharding.check_random(i, [(devices,), (1, devices), (devices, 1)])
        except Exception:
            failed[str(i)] = traceback.format_exc()[-1500:]
    return {"ran": count, "failed": failed, "stats": hoccl_jax.stats()}


def mixture(tokens: int, width: int, steps: int) -> dict[str, Any]:
    """A mixture of experts and its gradients, against the dense model on a CPU device of this process."""
    mesh = Mesh(np.array(jax.devices(PLATFORM)), moe.AXIS)
    params = moe.initial(width, 2 * mesh.size, seed=0)
    sharded = jax.shard_map(moe.mixture, mesh=mesh, in_specs=(moe.SPECS, P(moe.AXIS)), out_specs=P(moe.AXIS))

    def outcome(model: Any, router: jax.Array, up: jax.Array, down: jax.Array, x: jax.Array, cotangent: jax.Array) -> Any:
        y, pull = jax.vjp(model, moe.Params(router, up, down), x)
        gradients, of_x = pull(cotangent)
        return y, *gradients, of_x

    with jax.default_matmul_precision("highest"):
        ours = jax.jit(lambda *args: outcome(sharded, *args))
        reference = jax.jit(lambda *args: outcome(moe.dense, *args))
        furthest = 0.0
        for step in range(steps):
            x, wanted = map(np.asarray, moe.batch(mesh.size * tokens, width, step))
            arrays = (*map(np.asarray, params), x, wanted)
            specs = (*moe.SPECS, P(moe.AXIS), P(moe.AXIS))
            found = ours(*(resharding.place(each, NamedSharding(mesh, spec)) for each, spec in zip(arrays, specs, strict=True)))
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                expected = [np.asarray(each) for each in reference(*map(jnp.asarray, arrays))]
            for one, other in zip(found, expected, strict=True):
                for shard in one.addressable_shards:
                    apart = np.max(np.abs(np.asarray(shard.data) - other[shard.index])) / np.max(np.abs(other))
                    furthest = max(furthest, float(apart))
    hoccl_jax.check_errors()
    counts = hoccl_jax.stats()["operations"]
    return {"steps": steps, "furthest": furthest, "ragged_all_to_all": counts["ragged_all_to_all"]}
