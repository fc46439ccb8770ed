"""Checks of `reshard` against JAX's own resharding, on whatever devices there are."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FOREIGN = r" (all-gather|all-to-all|collective-permute|collective-broadcast|all-reduce|reduce-scatter)(?:-start)?\("


def mesh_of(sizes: tuple[int, ...], types: tuple[AxisType, ...] | None = None, order: Any = None) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(sizes)])
    devices = devices if order is None else devices[order]
    return Mesh(devices.reshape(sizes), tuple("abc"[: len(sizes)]), axis_types=types)


def random_spec(rng: random.Random, mesh: Mesh, ndim: int) -> P:
    """Explicit axes come first in each dimension."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = rng.sample(mesh.axis_names, rng.randint(0, len(mesh.axis_names)))
    entries: list[list[str]] = [[] for _ in range(ndim)]
    for name in sorted(names, key=lambda name: kinds[name] == AUTO):
        rng.choice(entries).append(name)
    return P(*[tuple(entry) or None for entry in entries])


def shards(x: jax.Array) -> dict[int, np.ndarray]:
    """By device."""
    return {shard.device.id: np.asarray(shard.data) for shard in x.addressable_shards}


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Like jax.device_put, but without the collective of XLA's by which that asks all processes whether they have the same x."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def resharded(x: np.ndarray, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """By JAX itself; between processes, whose GPU may be one that NCCL refuses, as the target says where everything lies."""
    return jax.device_put(place(x, source), target) if jax.process_count() == 1 else place(x, target)


def check(mesh: Mesh, shape: tuple[int, ...], dtype: str, source: P, target: P) -> None:
    """One program: x to the target, and a cotangent from there back. The data must lie as after JAX's resharding, moved by ours only."""
    given, wanted = NamedSharding(mesh, source), NamedSharding(mesh, target)
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with jax.set_mesh(mesh):

        def there_and_back(x: jax.Array, cotangent: jax.Array) -> Any:
            y, pull = jax.vjp(lambda x: hoccl_jax.reshard(x, target), x)
            return y, pull(cotangent)[0]

        # Of a dimension that is sharded along axes of both types, jit itself returns only the Explicit ones.
        out = (wanted, given) if len(set(mesh.axis_types)) > 1 else None
        program = jax.jit(there_and_back, out_shardings=out).lower(place(x, given), place(-x, wanted)).compile()
        y, gradient = program(place(x, given), place(-x, wanted))
    for ours, theirs in ((y, resharded(x, given, wanted)), (gradient, resharded(-x, wanted, given))):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim), (ours.sharding, theirs.sharding)
        jax.tree.map(np.testing.assert_array_equal, shards(ours), shards(theirs))
    assert re.findall(FOREIGN, str(program.as_text())) == []


def check_random(seed: int, meshes: Sequence[tuple[int, ...]]) -> None:
    rng = random.Random(seed)
    sizes = rng.choice(meshes)
    types = tuple(rng.choice([AUTO, EXPLICIT]) for _ in sizes) if seed % 3 == 0 else (AUTO if seed % 3 == 1 else EXPLICIT,) * len(sizes)
    order = rng.sample(range(int(np.prod(sizes))), int(np.prod(sizes)))
    mesh = mesh_of(sizes, types, order)
    ndim = rng.randint(1, 3)
    shape = tuple(mesh.size * rng.randint(1, 3) for _ in range(ndim))
    check(mesh, shape, rng.choice(["float32", "bfloat16"]), random_spec(rng, mesh, ndim), random_spec(rng, mesh, ndim))
