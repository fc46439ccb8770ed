"""What a program starts before and awaits after computation stays so in XLA's schedule, and no buffer in flight is copied."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests.aot import schedule

_WIDTH = 4096
_RING = [(0, 1), (1, 0)]


def layer(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights)


def step(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Passes x on while a layer works on it."""
    received, y = hoccl_jax.overlap(hoccl_jax.ppermute_start(x, "x", _RING), layer, x, weights)
    return received + y


def compiled(function: Callable[..., object], out_specs: object = P("x")) -> schedule.Schedule:
    specs = P("x"), P()
    return schedule.compiled(function, schedule.mesh(x=2), specs, out_specs, (2 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH))


def gradient(function: Callable[..., jax.Array]) -> Callable[..., object]:
    return jax.grad(lambda x, weights: jnp.sum(function(x, weights).astype(jnp.float32) ** 2), argnums=(0, 1))


def test_compute_between_start_and_done() -> None:
    found = compiled(step)
    assert found.halves() == [1]
    assert not found.copies()


def test_several_in_flight() -> None:
    def function(x: jax.Array, weights: jax.Array) -> object:
        futures = [hoccl_jax.all_gather_start(weights, "x"), hoccl_jax.all_to_all_start(x, "x", 0, 1, tiled=True)]
        (gathered, blocks), y = hoccl_jax.overlap(futures, layer, x, weights)
        return gathered, blocks, y

    found = compiled(function, out_specs=(P(None, "x"), P("x"), P("x")))
    assert found.halves() == [1, 1]
    assert not found.copies()


def test_a_slice_is_made_before_the_start() -> None:
    """XLA would fuse it into start and done, whose buffers would be two then."""

    def function(stacked: jax.Array, weights: jax.Array) -> object:
        future = hoccl_jax.ppermute_start(stacked[1], "x", _RING)
        return hoccl_jax.overlap(future, layer, stacked[0], weights)

    specs = P(None, "x"), P()
    found = schedule.compiled(function, schedule.mesh(x=2), specs, P("x"), (2, 2 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH))
    assert found.halves() == [1]
    assert [name for name in found.computations if any(i.kind == "hoccl_start" for i in found.computations[name])] == [found.entry]


def test_the_backward_pass_overlaps_its_transfers() -> None:
    """Both layers have two products of gradients, and the transfer of cotangents runs beside those of its layer."""
    found = compiled(gradient(lambda x, weights: step(step(x, weights), weights)), out_specs=(P("x"), P()))
    forward, backward = found.halves()[:2], found.halves()[2:]
    assert forward == [1, 1]
    assert len(backward) == 2
    assert min(backward) >= 1


def test_in_a_loop() -> None:
    found = compiled(lambda x, weights: jax.lax.scan(lambda x, _: (step(x, weights), None), x, length=4)[0])
    (body,) = [name for name in found.computations if found.halves(name)]
    assert body != found.entry
    assert found.halves(body) == [1]


def message(x: jax.Array, weights: jax.Array, *, early: bool = False) -> jax.Array:
    """Receives x of the other rank while a layer works on it; `early`: begins to before it is sent."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    future = hoccl_jax.precv_start(jax.lax.create_token(), like, "x", _RING) if early else None
    token = hoccl_jax.psend_start(x, "x", _RING).done()
    received, y = hoccl_jax.overlap(future or hoccl_jax.precv_start(token, like, "x", _RING), layer, x, weights)
    return received + y


@pytest.mark.parametrize("early", [False, True])
def test_compute_between_the_halves_of_a_receive(early: bool) -> None:
    found = compiled(functools.partial(message, early=early))
    assert sorted(found.halves()) == [0, 1]  # of the send, and of the receive
    assert not found.copies()


def test_a_receive_is_awaited_after_the_sends_before_it() -> None:
    """Nothing but the order of tracing says so."""

    def function(x: jax.Array, weights: jax.Array) -> object:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        future = hoccl_jax.precv_start(jax.lax.create_token(), like, "x", _RING)
        future, x = jax.lax.optimization_barrier((future, x))  # the receive is open before the layers begin
        y = layer(layer(x, weights), weights)
        hoccl_jax.psend(y, "x", _RING)
        return future.done(), y

    found = compiled(function, out_specs=(P("x"), P("x")))
    calls = [i for i in found.computations[found.entry] if i.kind.startswith("hoccl")]
    assert [call.kind for call in calls] == ["hoccl_start", "hoccl_collective", "hoccl_done"]
    (after,) = [i for i in found.computations[found.entry] if i.name == calls[2].operands[0]]
    assert calls[1].name in after.operands  # not by chance
    assert found.halves() == [2]
    assert not found.copies()


def test_messages_in_a_loop() -> None:
    found = compiled(lambda x, weights: jax.lax.scan(lambda x, _: (message(x, weights, early=True), None), x, length=4)[0])
    (body,) = [name for name in found.computations if found.halves(name)]
    assert body != found.entry
    assert sorted(found.halves(body)) == [0, 1]
