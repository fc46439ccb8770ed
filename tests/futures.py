"""What the tests of futures share: programs over a mesh of four CPU devices, and operands without rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

RING = ((0, 1), (1, 2), (2, 3), (3, 0))
PART = [(0, 2), (3, 1)]


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), "x")


def exact(x: jax.Array) -> jax.Array:
    """Some computation without rounding, which XLA may fuse as it likes."""
    return 3 * x + x[::-1]


def run(body: Callable[..., Any], *operands: np.ndarray, check_vma: bool = True) -> Any:
    def stacked(*operands: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], body(*(x[0] for x in operands)))

    return jax.jit(jax.shard_map(stacked, mesh=mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma))(*operands)


def operand(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-8, 8, (4, *shape)).astype(dtype)


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def carried_plain(x: jax.Array) -> Any:
    def step(x: jax.Array, scale: jax.Array) -> Any:
        y = lax.ppermute(x, "x", RING) * scale
        return y, y

    return lax.scan(step, x, jnp.arange(1.0, 4.0))[1]
