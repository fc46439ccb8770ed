"""`send` and `recv` between programs of different devices: the classic patterns, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import dispatch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax

LIKE = jax.ShapeDtypeStruct((3,), np.float32)


def on(device: int, function: Callable[..., Any], value: float = 0.0) -> Any:
    """Starts a program on a device; its argument is [value, value, value]."""
    return jax.jit(function)(jax.device_put(np.full(3, value, np.float32), jax.devices()[device]))


def test_both_send_first() -> None:
    def swap(peer: int, x: jax.Array) -> jax.Array:
        hoccl_jax.send(x, peer)
        return x + hoccl_jax.recv(LIKE, peer)

    left, right = on(0, lambda x: swap(1, x), 1), on(1, lambda x: swap(0, x), 10)
    np.testing.assert_array_equal(left, [11] * 3)
    np.testing.assert_array_equal(right, [11] * 3)


def test_everybody_sends_to_everybody_first() -> None:
    """Several devices receive from the same source with the same tag: no program's dispatch waits for another program's receive."""
    ranks, tags = len(jax.devices()), (1, 2)

    def program(rank: int) -> Callable[[jax.Array], Any]:
        others = [peer for peer in range(ranks) if peer != rank]

        def swap(x: jax.Array) -> list[jax.Array]:
            for tag in tags:
                for peer in others:
                    hoccl_jax.send(x + 10 * tag, peer, tag=tag)
            return [hoccl_jax.recv(LIKE, peer, tag=tag) for tag in reversed(tags) for peer in others]

        return swap

    rounds = [[on(rank, program(rank), 100 * turn + rank) for rank in range(ranks)] for turn in range(2)]
    for turn, results in enumerate(rounds):
        for rank, received in enumerate(results):
            sent = [100 * turn + peer + 10 * tag for tag in reversed(tags) for peer in range(ranks) if peer != rank]
            np.testing.assert_array_equal(np.stack(received)[:, 0], sent)


def test_a_ring_of_programs_in_a_loop() -> None:
    """Each of eight programs passes on what it got, as often as there are ranks, so everybody's value comes home."""
    ranks = len(jax.devices())

    def program(rank: int) -> Callable[[jax.Array], Any]:
        def turn(carry: jax.Array, _: Any) -> Any:
            hoccl_jax.send(carry, (rank + 1) % ranks, tag=7)
            return hoccl_jax.recv(LIKE, (rank - 1) % ranks, tag=7), carry

        return lambda x: lax.scan(turn, x, length=ranks)

    for rank, (home, seen) in enumerate([on(rank, program(rank), rank) for rank in range(ranks)]):
        np.testing.assert_array_equal(home, [rank] * 3)
        np.testing.assert_array_equal(seen[:, 0], (rank - np.arange(ranks)) % ranks)


def test_many_tags_in_any_order_and_equal_ones_in_turn() -> None:
    """Tags find their message however the receives are ordered; messages of one tag come as they were sent, across programs too."""
    order = [3, 0, 4, 1, 2]

    def sender(x: jax.Array) -> None:
        for tag in range(5):
            for turn in range(3):
                hoccl_jax.send(x + 10 * tag + turn, 1, tag=tag)

    def receiver(x: jax.Array) -> list[jax.Array]:
        return [0 * x + hoccl_jax.recv(LIKE, 0, tag=tag) for tag in order for _ in range(2)]

    on(0, sender)
    first = on(1, receiver)
    last = on(1, lambda x: [0 * x + hoccl_jax.recv(LIKE, 0, tag=tag) for tag in order])
    assert [int(x[0]) for x in first] == [10 * tag + turn for tag in order for turn in range(2)]
    assert [int(x[0]) for x in last] == [10 * tag + 2 for tag in order]


def test_pytrees_branches_and_types() -> None:
    tree: dict[str, Any] = {"a": jnp.arange(4, dtype=jnp.int4), "b": [jnp.ones((2, 2), bool), jax.random.key(3)]}
    given = jax.device_put(tree, jax.devices()[2])
    jax.jit(lambda tree, flag: lax.cond(flag, lambda: hoccl_jax.send(tree, 5, tag=1), lambda: None))(given, True)
    like = {"a": jax.ShapeDtypeStruct((4,), jnp.int4), "b": [jax.ShapeDtypeStruct((2, 2), bool), jax.typeof(tree["b"][1])]}
    with jax.default_device(jax.devices()[5]):
        received = jax.jit(lambda: hoccl_jax.recv(like, 2, tag=1))()
    assert received["a"].devices() == {jax.devices()[5]}
    for ours, theirs in zip(jax.tree.leaves(received), jax.tree.leaves(tree), strict=True):
        assert ours.dtype == theirs.dtype
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_array_equal(ours, theirs)


def test_programs_of_several_devices_need_tags() -> None:
    def twice(x: jax.Array) -> jax.Array:
        hoccl_jax.send(x, jax.devices()[4:], tag=3)
        hoccl_jax.send(x, jax.devices()[4:], tag=3)
        return x

    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    with pytest.raises(ValueError, match="keeps no order: use two tags"):
        jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(np.ones(4))


def test_what_does_not_agree_is_an_error_on_the_receiver() -> None:
    on(0, lambda x: hoccl_jax.send(x[:2], 1, tag=9))
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"ranks disagree.*send float32\[2\].*recv float32\[3\]"):
            np.asarray(on(1, lambda x: x + hoccl_jax.recv(LIKE, 0, tag=9)))
    finally:
        dispatch.runtime_tokens.clear()  # or jax reports the error once more at exit


@pytest.mark.parametrize(
    ("peer", "tag", "message"),
    [
        (0, 0, "a device occurs twice"),
        (99, 0, "ids of no devices"),
        ("cpu:1", 0, "dst must be a jax.Device"),
        (1, -1, "tag must be an integer"),
        (1, True, "tag must be an integer"),
        ([1, 2], 0, "needs as many peers"),
    ],
)
def test_misuse(peer: Any, tag: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on(0, lambda x: hoccl_jax.send(x, peer, tag=tag))
