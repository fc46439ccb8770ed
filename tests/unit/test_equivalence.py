"""hoccl_jax equals jax.lax, bit for bit, in random cases over everything that can vary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests import cases

# Half of them take each transformation of each operation once, and each type several times.
_CASES = [
    pytest.param(case, marks=[pytest.mark.any_jax] if case.number >= 280 else [], id=str(case))
    for case in cases.generate(8, seed=0, count=560)
]


@pytest.mark.parametrize("case", _CASES)
def test_equals_jax_lax(case: cases.Case) -> None:
    cases.check(case, jax.devices())


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("to", ["varying", "invarying", "reduced"])
def test_gradient_of_a_gathered_weight(to: str, tiled: bool) -> None:
    """The type that the result has under check_vma decides how the gradient goes back."""
    mesh = Mesh(np.array(jax.devices()), "x")

    def value_and_grad(library: Any) -> Any:
        def loss(weight: jax.Array, scale: jax.Array) -> jax.Array:
            gathered = library.all_gather(weight, "x", to=to, tiled=tiled).reshape(16)
            return jnp.sum(gathered * gathered * scale)

        def body(weight: jax.Array, scale: jax.Array) -> Any:
            scale = scale if to == "invarying" else lax.pcast(scale, "x", to="varying")
            return jax.tree.map(lambda y: y[None], jax.value_and_grad(loss)(weight, scale))

        program = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        return jax.jit(program)(np.arange(16, dtype=np.float32), np.arange(16, dtype=np.float32))

    for ours, theirs in zip(value_and_grad(hoccl_jax), value_and_grad(lax), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_follows_treats_denormals_as_what_is_before() -> None:
    """XLA's threads flush denormals to zero, and so must the thread that goes on with the program after a collective."""
    mesh = Mesh(np.array(jax.devices()), "x")

    def halves(library: Any) -> np.ndarray:
        def body(x: jax.Array) -> jax.Array:
            gathered = lax.optimization_barrier(library.all_gather(x, "x", tiled=True))
            return jnp.stack([jnp.max(x * 0.5), jnp.max(gathered * 0.5)])[None]

        x = np.full(8 * 100_000, 3e-39, np.float32)  # too large for the thread that posts to copy it
        return np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x))

    np.testing.assert_array_equal(halves(hoccl_jax), halves(lax))
