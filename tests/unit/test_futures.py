"""Collectives in two halves: values and gradients are those of jax.lax, and a future that goes wrong is an error that says so."""

from __future__ import annotations

import functools
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
from tests.futures import PART, RING, assert_same, carried_plain, exact, mesh, operand, run

_GROUPS = [[2, 0], [1, 3]]

# Name -> arguments, for operands of shape [8, 4].
OPERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("all_gather", {"axis": 1}),
    ("all_gather", {"tiled": True, "axis_index_groups": _GROUPS}),
    ("all_to_all", {"split_axis": 0, "concat_axis": 1, "tiled": True}),
    ("all_to_all", {"split_axis": 1, "concat_axis": 1}),
    ("ppermute", {"perm": RING}),
    ("ppermute", {"perm": PART}),
    ("ppermute", {"perm": []}),
    ("pshuffle", {"perm": [2, 0, 3, 1]}),
    ("pbroadcast", {"source": 2}),
]


def ours(name: str, x: Any, **arguments: Any) -> Any:
    """The operation, with some computation between its halves."""
    return hoccl_jax.overlap(getattr(hoccl_jax, f"{name}_start")(x, "x", **arguments), exact, x)


def theirs(name: str, x: Any, **arguments: Any) -> Any:
    library = hoccl_jax if name == "pbroadcast" else lax  # which jax.lax lacks on CPU devices
    return getattr(library, name)(x, "x", **arguments), exact(x)


def gradient(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], jax.Array]:
    return jax.grad(lambda x: sum(jnp.sum(y**2) for y in jax.tree.leaves(function(x))))


def in_scan(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    return lambda x: lax.scan(lambda carry, y: (carry, function(y)), None, jnp.stack([x, 2 * x, x]))[1]


TRANSFORMS: dict[str, Callable[[Callable[[jax.Array], Any]], Callable[[jax.Array], Any]]] = {
    "plain": lambda function: function,
    "jvp": lambda function: lambda x: jax.jvp(function, (x,), (2 * x,)),
    "remat": lambda function: gradient(jax.checkpoint(lambda x: function(x * x))),
    "grad_of_scan": lambda function: gradient(in_scan(function)),
    "vmap": lambda function: lambda x: jax.vmap(function, in_axes=2, out_axes=0)(jnp.stack([x, 2 * x], axis=2)),
    "vmap_of_grad": lambda function: lambda x: jax.vmap(gradient(function), in_axes=1)(jnp.stack([x, 2 * x], axis=1)),
}


@pytest.mark.parametrize(
    ("transform", "check_vma"), [*((transform, True) for transform in TRANSFORMS), ("plain", False), ("grad_of_scan", False)]
)
def test_every_operation_equals_jax_lax(transform: str, check_vma: bool) -> None:
    """All operations in one program, so they are in flight together too."""

    def body(x: jax.Array) -> Any:
        pairs = []
        for name, arguments in OPERATIONS:
            # The transpose of the untiled psum_scatter can't be vmapped over a later dimension in jax.lax.
            if transform == "vmap_of_grad" and arguments.get("axis"):
                continue
            sides = [functools.partial(side, name, **arguments) for side in (ours, theirs)]
            pairs.append([TRANSFORMS[transform](side)(x) for side in sides])
        return pairs

    for one, other in run(body, operand(8, 4), check_vma=check_vma):
        assert_same(one, other)


def test_pytrees_and_narrow_types() -> None:
    def both(x: Any) -> Any:
        return hoccl_jax.ppermute_start(x, "x", RING).done(), lax.ppermute(x, "x", RING)

    def body(x: jax.Array) -> Any:
        results = both({"a": x, "b": [x.astype(jnp.int4), x.astype(bool), None, x.astype(jnp.bfloat16)]})
        return jax.tree.map(lambda y: y.astype(np.float32), results)

    assert_same(*run(body, operand(3)))


def test_futures_overlap_each_other_and_end_in_any_order() -> None:
    def body(x: jax.Array) -> Any:
        futures = [hoccl_jax.ppermute_start(x * i, "x", RING) for i in range(12)]
        first, _ = hoccl_jax.overlap(futures[:4], exact, x)
        return [*first, *(future.done() for future in reversed(futures[4:]))], [
            lax.ppermute(x * i, "x", RING) for i in (*range(4), *reversed(range(4, 12)))
        ]

    assert_same(*run(body, operand(1000)))


def test_a_single_rank_needs_no_transfer() -> None:
    one = Mesh(np.array(jax.devices()[:1]), "x")
    body = jax.shard_map(lambda x: hoccl_jax.all_gather_start(x, "x", tiled=True).done(), mesh=one, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(body)(np.arange(3)), np.arange(3))


def test_disabled_is_jax_lax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCCL_DISABLE", "1")
    body = jax.shard_map(lambda x: ours("ppermute", x, perm=RING), mesh=mesh(), in_specs=P("x"), out_specs=P("x"))
    text = jax.jit(body).lower(operand(4)).as_text()
    assert "collective_permute" in text
    assert "hoccl" not in text


# Staged


def staged(x: jax.Array) -> hoccl_jax.Future:
    return hoccl_jax.ppermute_start(x, "x", RING, staged=True)


def carried_staged(x: jax.Array) -> Any:
    """Each round awaits what the one before it started; the last start is dropped."""

    def step(future: hoccl_jax.Future, scale: jax.Array) -> Any:
        y = future.done() * scale
        return staged(y), y

    return lax.scan(step, staged(x), jnp.arange(1.0, 4.0))[1]


def through_cond_and_jit(x: jax.Array) -> Any:
    future = jax.jit(staged)(x)
    return lax.cond(lax.axis_index("x") < 2, lambda future: future.done(), lambda future: -future.done(), future)


@pytest.mark.parametrize("transform", ["plain", "jvp", "remat", "vmap"])
def test_staged_futures_go_through_loops(transform: str) -> None:
    change = TRANSFORMS[transform]

    def body(x: jax.Array) -> Any:
        return change(carried_staged)(x), change(carried_plain)(x)

    for _ in range(4):  # each run forgets what earlier ones left
        assert_same(*run(body, operand(4, 3)))


def test_staged_futures_go_through_branches_and_jit() -> None:
    def body(x: jax.Array) -> Any:
        y = lax.ppermute(x, "x", RING)
        return through_cond_and_jit(x), jnp.where(lax.axis_index("x") < 2, y, -y)

    assert_same(*run(body, operand(5)))


@pytest.mark.parametrize(("name", "arguments"), OPERATIONS)
def test_every_operation_has_a_staged_form(name: str, arguments: dict[str, Any]) -> None:
    def body(x: jax.Array) -> Any:
        return getattr(hoccl_jax, f"{name}_start")(x, "x", staged=True, **arguments).done(), theirs(name, x, **arguments)[0]

    assert_same(*run(body, operand(8, 4)))


@pytest.mark.parametrize(("name", "arguments"), OPERATIONS)
def test_nothing_is_staged_too(name: str, arguments: dict[str, Any]) -> None:
    def body(x: jax.Array) -> Any:  # jax.lax gathers nothing that is empty
        future = getattr(hoccl_jax, f"{name}_start")(x, "x", staged=True, **arguments)
        return future.done(), getattr(hoccl_jax, name)(x, "x", **arguments)

    assert_same(*run(body, operand(0, 4)))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("all_gather", {"tiled": True}),
        ("all_to_all", {"split_axis": 0, "concat_axis": 1, "tiled": True}),
        ("ppermute", {"perm": [(0, 0)]}),
        ("pbroadcast", {"source": 0}),
    ],
)
def test_a_rank_alone_stages_what_it_keeps(name: str, arguments: dict[str, Any]) -> None:
    """The buffers are the engine's even so: a loop carries the future while its operand changes."""

    def body(x: jax.Array) -> Any:
        def step(future: hoccl_jax.Future, scale: jax.Array) -> Any:
            y = future.done() * scale
            return start(y), y

        start = functools.partial(getattr(hoccl_jax, f"{name}_start"), axis_name="x", staged=True, **arguments)
        return lax.scan(step, start(x), jnp.arange(1.0, 4.0))[1]

    alone = Mesh(np.array(jax.devices()[:1]), "x")
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    results = jax.jit(jax.shard_map(body, mesh=alone, in_specs=P("x"), out_specs=P(None, "x"), check_vma=False))(x)
    np.testing.assert_array_equal(results, np.stack([x, 2 * x, 6 * x]))


def test_a_staged_future_is_used_once() -> None:
    def body(x: jax.Array) -> Any:
        future = staged(x)
        return future.done() + jax.tree.map(lambda leaf: leaf, future).done()

    with pytest.raises(jax.errors.JaxRuntimeError, match="has been used already"):
        jax.block_until_ready(run(body, operand(8)))


def test_staged_gathers_have_no_gradient() -> None:
    with pytest.raises(NotImplementedError, match="leave staged out"):
        run(gradient(lambda x: hoccl_jax.all_gather_start(x, "x", staged=True).done()), operand(8))


# What goes wrong


def start(x: jax.Array) -> hoccl_jax.Future:
    return hoccl_jax.ppermute_start(x, "x", RING)


def twice(x: jax.Array) -> Any:
    future = start(x)
    return future.done() + future.done()


def twice_as_a_pytree(x: jax.Array) -> Any:
    future = start(x)
    return future.done() + jax.tree.map(lambda leaf: leaf, future).done()


def awaited_after_overlap(x: jax.Array) -> Any:
    future = start(x)
    return hoccl_jax.overlap(future, jnp.sin, x)[0] + future.done()


def out_of_jit(x: jax.Array) -> Any:
    return jax.jit(start)(x).done()


def into_jit(x: jax.Array) -> Any:
    return jax.jit(lambda future: future.done())(start(x))


def into_scan(x: jax.Array) -> Any:
    future = start(x)
    return lax.scan(lambda carry, _: (carry + future.done(), None), x, length=2)[0]


def carried_by_scan(x: jax.Array) -> Any:
    return lax.scan(lambda future, _: (start(future.done()), None), start(x), length=2)[0].done()


def rebuilt(x: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, start(x)).done()


def dropped(x: jax.Array) -> Any:
    return start(x)


def dropped_by_scan(x: jax.Array) -> Any:
    return lax.scan(lambda carry, _: (carry, start(carry)), x, length=2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (twice, "has been used already"),
        (twice_as_a_pytree, "has been used already"),
        (awaited_after_overlap, "has been used already"),
        (out_of_jit, "comes from another function"),
        (into_jit, "comes from another function"),
        (into_scan, "comes from another function"),
        (carried_by_scan, "comes from another function"),
        (rebuilt, "comes from another function"),
    ],
)
def test_a_future_in_the_wrong_place_does_not_compile(function: Callable[[jax.Array], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(function, operand(8))


@pytest.mark.parametrize("function", [dropped, dropped_by_scan])
def test_a_future_that_nothing_awaits_sends_nothing(function: Callable[[jax.Array], Any]) -> None:
    hoccl_jax.init()
    hoccl_jax.reset_stats()
    with pytest.raises(jax.errors.JaxRuntimeError, match="nothing in this compiled program awaits its future"):
        jax.block_until_ready(run(function, operand(8)))
    assert hoccl_jax.stats()["operations"]["ppermute"] == 0


def test_a_vmapped_axis_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="ppermute_start over the vmapped axis 'x': use ppermute"):
        jax.vmap(lambda x: hoccl_jax.ppermute_start(x, "x", RING).done(), axis_name="x")(np.arange(4))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("name", "arguments"), OPERATIONS)
def test_keys_are_moved_as_a_whole(name: str, arguments: dict[str, Any], staged: bool) -> None:
    def body(x: jax.Array) -> Any:
        operand = {"key": jax.random.wrap_key_data(x), "x": x[..., 0]}
        future = getattr(hoccl_jax, f"{name}_start")(operand, "x", staged=staged, **arguments)
        whole = getattr(hoccl_jax, name)(operand, "x", **arguments)  # of jax.lax the all_gather fails on them
        results = hoccl_jax.overlap(future, exact, operand["x"])[0], whole
        return [result | {"key": jax.random.key_data(result["key"])} for result in results]

    assert_same(*run(body, operand(8, 4, 2, dtype=np.uint32)))


# What nothing uses


def unused(x: jax.Array) -> jax.Array:
    return hoccl_jax.overlap(start(x), jnp.sin, x)[1]


def unused_by_the_caller(x: jax.Array) -> jax.Array:
    return jax.jit(functools.partial(ours, "ppermute", perm=RING))(x)[1]


def unused_in_a_branch(x: jax.Array) -> jax.Array:
    return lax.cond(x[0] < 1e6, functools.partial(ours, "ppermute", perm=RING), lambda x: (x, x), x)[1]


def gradient_that_is_not_asked_for(x: jax.Array) -> jax.Array:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        received, y = hoccl_jax.overlap(start(x), jnp.square, y)
        return jnp.sum(received + y)

    return jax.grad(loss, 1)(x, x)


@pytest.mark.parametrize("function", [unused, unused_by_the_caller, unused_in_a_branch])
def test_a_result_that_nothing_uses_moves_nothing(function: Callable[[jax.Array], jax.Array]) -> None:
    hoccl_jax.init()
    hoccl_jax.reset_stats()
    jax.block_until_ready(run(function, operand(8)))
    assert hoccl_jax.stats()["operations"]["ppermute"] == 0


def test_a_gradient_that_is_not_asked_for_moves_nothing() -> None:
    hoccl_jax.init()
    hoccl_jax.reset_stats()
    x = operand(8)
    np.testing.assert_array_equal(run(gradient_that_is_not_asked_for, x), 2 * x)
    assert hoccl_jax.stats()["operations"]["ppermute"] == 0


# What vmap leaves alone


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("name", "arguments"), OPERATIONS)
def test_a_future_that_is_not_batched(name: str, arguments: dict[str, Any], staged: bool) -> None:
    def body(x: jax.Array) -> Any:
        begin = functools.partial(getattr(hoccl_jax, f"{name}_start"), axis_name="x", staged=staged, **arguments)
        mine = jax.vmap(lambda y: hoccl_jax.overlap(begin(x), exact, y))(jnp.stack([x, 2 * x]))
        received, computed = theirs(name, x, **arguments)
        return mine, (jnp.stack([received, received]), jnp.stack([computed, exact(2 * x)]))

    assert_same(*run(body, operand(8, 4)))
