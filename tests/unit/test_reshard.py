"""`reshard` equals JAX's own resharding, forward and backward, and moves the data by our collectives only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax import partitioning, reshard_plan
from tests import resharding
from tests.resharding import mesh_of, shards


@pytest.mark.parametrize("seed", range(30))
def test_random_reshardings(seed: int) -> None:
    hoccl_jax.reset_stats()
    resharding.check_random(seed, [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (1, 4)])
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
