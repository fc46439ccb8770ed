"""`reshard` equals JAX's own resharding, forward and backward, and moves the data by our collectives only."""

from __future__ import annotations

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax import partitioning, reshard_plan

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


def check(mesh: Mesh, shape: tuple[int, ...], dtype: str, source: P, target: P) -> None:
    """One program: x to the target, and a cotangent from there back. The data must lie as after JAX's own resharding."""
    given, wanted = NamedSharding(mesh, source), NamedSharding(mesh, target)
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with jax.set_mesh(mesh):

        def there_and_back(x: jax.Array, cotangent: jax.Array) -> Any:
            y, pull = jax.vjp(lambda x: hoccl_jax.reshard(x, target), x)
            return y, pull(cotangent)[0]

        # Of a dimension that is sharded along axes of both types, jit itself returns only the Explicit ones.
        out = (wanted, given) if len(set(mesh.axis_types)) > 1 else None
        program = jax.jit(there_and_back, out_shardings=out).lower(jax.device_put(x, given), jax.device_put(-x, wanted)).compile()
        y, gradient = program(jax.device_put(x, given), jax.device_put(-x, wanted))
    for ours, theirs in ((y, jax.device_put(x, wanted)), (gradient, jax.device_put(-x, given))):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim), (ours.sharding, theirs.sharding)
        jax.tree.map(np.testing.assert_array_equal, shards(ours), shards(theirs))
    assert re.findall(FOREIGN, str(program.as_text())) == []


@pytest.mark.parametrize("seed", range(30))
def test_random_reshardings(seed: int) -> None:
    rng = random.Random(seed)
    sizes = rng.choice([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (1, 4)])
    types = tuple(rng.choice([AUTO, EXPLICIT]) for _ in sizes) if seed % 3 == 0 else (AUTO if seed % 3 == 1 else EXPLICIT,) * len(sizes)
    order = rng.sample(range(int(np.prod(sizes))), int(np.prod(sizes)))
    mesh = mesh_of(sizes, types, order)
    ndim = rng.randint(1, 3)
    shape = tuple(mesh.size * rng.randint(1, 3) for _ in range(ndim))
    hoccl_jax.reset_stats()
    check(mesh, shape, rng.choice(["float32", "bfloat16"]), random_spec(rng, mesh, ndim), random_spec(rng, mesh, ndim))
    assert hoccl_jax.stats()["fallbacks"] == {}


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (P("a"), P(), ["all_gather"]),
        (P(("b", "a")), P("b"), ["all_gather"]),
        (P("a"), P(None, "a"), ["all_to_all"]),
        (P(("a", "b")), P(None, ("a", "b")), ["all_to_all"]),
        (P("a", "b"), P("b", "a"), ["ppermute"]),
        (P(("a", "b")), P(("b", "a")), ["ppermute"]),
        (P("a"), P("b"), ["ppermute"]),
        (P(), P("a", "b"), ["slice", "slice"]),
        (P("a"), P(("a", "b")), ["slice"]),
        (P("a", "b"), P("a", "b"), []),
    ],
)
def test_the_step_is_the_cheapest_one(source: P, target: P, kinds: list[str]) -> None:
    sizes = (("a", 2), ("b", 2))
    layouts = [partitioning._layout(NamedSharding(mesh_of((2, 2)), spec), 2) for spec in (source, target)]
    steps = reshard_plan.plan((1024, 1024), 4, sizes, *layouts)
    assert steps is not None
    assert [step.kind for step in steps] == kinds


def test_large_arrays_take_more_steps_and_fewer_bytes() -> None:
    """Dropping the major one of two axes: small arrays in one gather of everything, large ones without it."""
    sizes, source, target = (("a", 2), ("b", 4)), (("a", "b"),), (("b",),)
    small, large = (reshard_plan.plan((n,), 4, sizes, source, target) for n in (64, 1 << 24))
    assert small is not None
    assert large is not None
    assert [step.kind for step in small] == ["all_gather", "slice"]
    assert [step.kind for step in large] == ["ppermute", "all_gather"]


def test_uneven_shards_are_left_to_xla_and_counted() -> None:
    mesh = mesh_of((4,))
    x = np.arange(6.0, dtype=np.float32)
    hoccl_jax.reset_stats()
    uneven = jax.jit(lambda x: jnp.sum(hoccl_jax.reshard(2 * x, NamedSharding(mesh, P("a"))) * x))
    assert uneven(jax.device_put(x, NamedSharding(mesh, P()))) == 2 * (x * x).sum()
    assert hoccl_jax.stats()["fallbacks"] == {"reshard": 1}


def test_only_the_devices_differ() -> None:
    """Outside jit, over meshes with their devices in different orders."""
    x = np.arange(96.0, dtype=np.float32).reshape(8, 12)
    for source, target in ((P("a", "b"), P("a", "b")), (P("a"), P("a")), (P("b"), P(None, "a"))):
        before = jax.device_put(x, NamedSharding(mesh_of((2, 4)), source))
        wanted = NamedSharding(mesh_of((2, 4), order=[3, 1, 4, 0, 5, 2, 7, 6]), target)
        hoccl_jax.reset_stats()
        after = jax.block_until_ready(hoccl_jax.reshard(before, wanted))
        assert after.sharding.is_equivalent_to(wanted, 2)
        jax.tree.map(np.testing.assert_array_equal, shards(after), shards(jax.device_put(x, wanted)))
        assert hoccl_jax.stats()["operations"]["ppermute"] == 8
        assert hoccl_jax.stats()["fallbacks"] == {}


def test_transformations_and_pytrees() -> None:
    mesh = mesh_of((2, 4))
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("a", "b")))
    to = NamedSharding(mesh, P("b"))

    def loss(x: jax.Array) -> jax.Array:
        row = jax.checkpoint(jax.vmap(lambda row: jnp.sin(hoccl_jax.reshard(row, to)), in_axes=1))(x)
        carry, _ = jax.lax.scan(lambda carry, _: (hoccl_jax.reshard(carry, NamedSharding(mesh, P("a"))) * 2, None), row, length=2)
        return jnp.sum(carry * carry)

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum((4 * jnp.sin(x)) ** 2)

    alone = jnp.asarray(np.asarray(x))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), jax.grad(plain)(alone), rtol=1e-5)
    curvature = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])(x)
    np.testing.assert_allclose(curvature, jax.jvp(jax.grad(plain), (alone,), (alone,))[1], rtol=1e-4)
    key = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("b")))
    tree = hoccl_jax.reshard({"x": x, "keys": key}, {"x": P(None, "a"), "keys": NamedSharding(mesh, P())})
    assert tree["x"].sharding.spec == P(None, "a")
    assert tree["keys"].is_fully_replicated
    np.testing.assert_array_equal(jax.random.key_data(tree["keys"]), jax.random.key_data(key))
    np.testing.assert_array_equal(tree["x"], x)


@pytest.mark.parametrize(
    ("sharding", "error", "message"),
    [
        (P("a", None, None), ValueError, "more entries than x of shape"),
        (P(P.UNCONSTRAINED), ValueError, "must say for each dimension"),
        ("a", TypeError, "sharding_or_spec must be"),
        (None, TypeError, "sharding_or_spec must be"),
        (P("nowhere"), ValueError, "nowhere"),
    ],
)
def test_misuse(sharding: Any, error: type[Exception], message: str) -> None:
    x = jax.device_put(np.ones((4, 4)), NamedSharding(mesh_of((2,)), P("a")))
    with pytest.raises(error, match=message):
        hoccl_jax.reshard(x, sharding)


def test_a_spec_needs_a_mesh() -> None:
    with pytest.raises(ValueError, match=r"needs a mesh.*jax\.set_mesh"):
        hoccl_jax.reshard(np.ones(4), P("a"))
