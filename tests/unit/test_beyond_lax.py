"""What jax.lax itself can't do, or does wrong, on CPU devices in the supported versions: here the expected result is computed otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax

RANKS = 4
MAPPED = 4


def on_ranks(function: Callable[..., Any], *operands: Any, check_vma: bool = True) -> Any:
    """Runs `function` on each rank's operand, its slice of the leading dimension, and stacks the results."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), "x")
    body = jax.shard_map(
        lambda *xs: jax.tree.map(lambda y: y[None], function(*(x[0] for x in xs))),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    return jax.tree.map(np.asarray, jax.jit(body)(*operands))


def counted(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "float8_e3m4", "float8_e8m0fnu", "complex64"])
def test_all_bits_survive(dtype: str) -> None:
    """Also those of NaNs, which XLA:CPU changes where it widens small floats for its own collectives."""
    size = jnp.dtype(dtype).itemsize
    x = np.random.default_rng(0).integers(0, 256, (RANKS, RANKS, 5 * size), np.uint8).view(dtype)
    bits = x.view(np.uint8)
    gathered, exchanged, moved = on_ranks(
        lambda x: (
            hoccl_jax.all_gather(x, "x"),
            hoccl_jax.all_to_all(x, "x", 0, 0),
            hoccl_jax.ppermute(x, "x", [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]),
        ),
        x,
    )
    np.testing.assert_array_equal(gathered.view(np.uint8), np.broadcast_to(bits, (RANKS, *bits.shape)))
    np.testing.assert_array_equal(exchanged.view(np.uint8), bits.swapaxes(0, 1))
    np.testing.assert_array_equal(moved.view(np.uint8), np.roll(bits, 1, axis=0))


@pytest.mark.parametrize(("split", "concat"), [(0, 2), (2, 0), (1, 0), (0, 1)])
def test_gradient_of_untiled_all_to_all(split: int, concat: int) -> None:
    """The cotangent of a permutation of all elements is the inverse permutation."""
    shape = [3, 5, 2]
    shape[split] = RANKS
    x = counted(RANKS, *shape)

    def there_and_back(x: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x: hoccl_jax.all_to_all(x, "x", split, concat), x)
        return pullback(y)[0]

    np.testing.assert_array_equal(on_ranks(there_and_back, x), x)


@pytest.mark.parametrize("batch_axis", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gradient_of_untiled_all_gather_under_vmap(axis: int, batch_axis: int) -> None:
    def pull(cotangent: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: hoccl_jax.all_gather(x, "x", axis=axis), jnp.zeros((3, 5)))(cotangent)[0]

    shape = list(np.insert((3, 5), axis, RANKS))
    shape.insert(batch_axis, 2)
    cotangents = counted(RANKS, *shape)
    pulled = on_ranks(lambda c: jax.vmap(pull, in_axes=batch_axis, out_axes=0)(c), cotangents, check_vma=False)
    summed = np.moveaxis(cotangents, batch_axis + 1, 1).sum(axis=0)  # over ranks: [batch, ...]
    np.testing.assert_array_equal(pulled, np.moveaxis(summed, axis + 1, 0))


@pytest.mark.parametrize("source", [0, 2, -1])
def test_gradient_of_pbroadcast(source: int) -> None:
    cotangents = counted(RANKS, 3)
    pulled = on_ranks(lambda c: jax.vjp(lambda x: hoccl_jax.pbroadcast(x, "x", source), 0 * c)[1](c)[0], cotangents)
    expected = np.zeros_like(cotangents)
    expected[source] = cotangents.sum(axis=0)
    np.testing.assert_array_equal(pulled, expected)


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_pbroadcast_over_a_vmapped_axis(batch_axis: int) -> None:
    x = counted(MAPPED, 3)
    given = np.moveaxis(x, 0, batch_axis)
    result = jax.vmap(lambda x: hoccl_jax.pbroadcast(x, "v", 2), in_axes=batch_axis, axis_name="v")(given)
    np.testing.assert_array_equal(result, np.tile(x[2], (MAPPED, 1)))


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_partial_permutation_over_a_vmapped_axis(batch_axis: int) -> None:
    """Indices that are no destination get zeros, as ranks do."""
    x = 1 + counted(MAPPED, 3)
    given = np.moveaxis(x, 0, batch_axis)
    result = jax.vmap(lambda x: hoccl_jax.ppermute(x, "v", [(3, 0), (1, 2)]), in_axes=batch_axis, axis_name="v")(given)
    np.testing.assert_array_equal(result, [x[3], 0 * x[0], x[1], 0 * x[0]])


def test_partial_permutation_of_a_value_that_is_not_mapped() -> None:
    _, result = jax.vmap(lambda x: (x, hoccl_jax.ppermute(jnp.float32(7), "v", [(0, 1)])), axis_name="v")(counted(MAPPED))
    np.testing.assert_array_equal(result, [0, 7, 0, 0])


def test_permutation_over_mapped_and_mesh_axes_is_refused() -> None:
    """jax.lax permutes over the mesh axis alone, with the indices of both."""

    def body(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: hoccl_jax.ppermute(x, ("v", "x"), [(0, 1)]), axis_name="v")(x)

    with pytest.raises(NotImplementedError, match="vmapped axis and others"):
        on_ranks(body, counted(RANKS, MAPPED, 3), check_vma=False)


def test_send_and_receive_in_either_order_of_several() -> None:
    """The k-th receive takes the k-th send of equal data, whatever else lies between."""
    forward = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]
    back = [(dst, src) for src, dst in forward]

    def body(x: jax.Array) -> Any:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        first = hoccl_jax.psend(x, "x", forward)
        other = hoccl_jax.psend(x, "x", back)
        second = hoccl_jax.psend(10 * x, "x", forward)
        return (
            hoccl_jax.precv(other, like, "x", back),
            hoccl_jax.precv(first, like, "x", forward),
            hoccl_jax.precv(second, like, "x", forward),
        )

    x = counted(RANKS, 3)
    backward, first, second = on_ranks(body, x)
    np.testing.assert_array_equal(backward, np.roll(x, -1, axis=0))
    np.testing.assert_array_equal(first, np.roll(x, 1, axis=0))
    np.testing.assert_array_equal(second, np.roll(10 * x, 1, axis=0))


def test_send_and_receive_have_no_vmap() -> None:
    with pytest.raises(NotImplementedError, match="psend under vmap"):
        on_ranks(lambda x: jax.vmap(lambda x: hoccl_jax.psend(x, "x", [(0, 1)]))(x), counted(RANKS, 3, 2))


def test_zero_sized_results_need_no_exchange() -> None:
    """Along a gathered dimension of size 0 XLA itself refuses to compile."""
    x = np.zeros((RANKS, 3, 0), np.float32)
    before = hoccl_jax.stats()["operations"]
    gathered, moved = on_ranks(lambda x: (hoccl_jax.all_gather(x, "x", axis=1, tiled=True), hoccl_jax.ppermute(x, "x", [(0, 1)])), x)
    assert gathered.shape == (RANKS, 3, 0)
    assert moved.shape == x.shape
    assert hoccl_jax.stats()["operations"] == before


def test_partly_automatic_shard_map() -> None:
    """Collectives over the manual axis, while XLA shards along another one."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "auto"))
    x = jax.device_put(counted(8, 6), jax.NamedSharding(mesh, P("x", "auto")))

    def program(library: Any) -> Any:
        body = jax.shard_map(
            lambda x: 2 * library.all_gather(x, "x", axis=1, tiled=True), mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
        )
        return jax.jit(body)(x)

    np.testing.assert_array_equal(program(hoccl_jax), program(lax))
