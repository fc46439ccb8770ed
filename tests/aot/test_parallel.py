"""The training helpers in XLA's schedule: gathers, reductions and pipeline transfers run beside matrix products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from hoccl_jax.parallel import fsdp, pipeline
from tests.aot import schedule

_WIDTH = 4096
_REDUCTION = ("reduce-scatter-start", "reduce-scatter-done")


def layer(params: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params)


def squares(y: jax.Array) -> jax.Array:
    return jnp.sum(y.astype(jnp.float32) ** 2)


def two_arrays(params: Any, x: jax.Array) -> jax.Array:
    return layer(params["second"], layer(params["first"], x))


def fsdp_gradient(layers: int, stacked: bool, **how: Any) -> schedule.Schedule:
    def gradient(x: jax.Array, shards: jax.Array) -> Any:
        def loss(x: jax.Array, shards: jax.Array) -> jax.Array:
            return squares(fsdp.apply_layers(layer, shards if stacked else list(shards), x, axis_name="x", **how))

        return jax.grad(loss, argnums=(0, 1))(x, shards)

    specs = P("x"), P(None, "x")
    return schedule.compiled(gradient, schedule.mesh(x=2), specs, specs, (2 * _WIDTH, _WIDTH), (layers, _WIDTH, _WIDTH))


def test_fsdp_layer_by_layer() -> None:
    """Straight line: four gathers forward, of which the first has nothing to hide behind, and four backward."""
    found = fsdp_gradient(layers=4, stacked=False)
    forward, backward = found.transfers()[:4], found.transfers()[4:]
    assert forward == [0, 1, 1, 1]
    assert len(backward) == 4
    assert min(backward) >= 1
    reductions = found.spans(*_REDUCTION)
    assert len(reductions) == 4
    assert sum(count > 0 for count in reductions) >= 3


def test_fsdp_in_a_loop() -> None:
    """Two layers a round; gathered parameters are not copied from round to round, forward."""
    found = fsdp_gradient(layers=8, stacked=True)
    forward, backward = sorted(found.loops(2), key=lambda name: sum(found.transfers(name)))
    assert found.transfers(forward) == [1, 1]
    assert not [i for i in found.computations[forward] if i.opcode == "copy"]
    assert min(found.transfers(backward)) >= 1
    assert min(found.spans(*_REDUCTION, backward)) >= 1


def test_fsdp_by_halves_in_a_loop() -> None:
    found = fsdp_gradient(layers=8, stacked=True, halves=True)
    loops = [name for name in found.computations if name != found.entry and len(found.halves(name)) == 2]
    forward, backward = sorted(loops, key=lambda name: sum(found.halves(name)))
    assert found.halves(forward) == [1, 1]
    assert not [i for i in found.computations[forward] if i.opcode == "copy"]
    assert min(found.halves(backward)) >= 1
    assert min(found.spans(*_REDUCTION, backward)) >= 1


def test_fsdp_by_halves_gathers_all_arrays_of_a_layer_during_the_layer_before() -> None:
    """Of XLA's annotated calls two can be on their way at a time; halves have no such limit."""

    def forward(x: jax.Array, first: jax.Array, second: jax.Array) -> Any:
        return fsdp.apply_layers(two_arrays, {"first": first, "second": second}, x, axis_name="x", halves=True)

    shards = (7, _WIDTH, _WIDTH)
    specs = P("x"), P(None, "x"), P(None, "x")
    found = schedule.compiled(forward, schedule.mesh(x=2), specs, P("x"), (2 * _WIDTH, _WIDTH), shards, shards)
    (loop,) = [name for name in found.computations if name != found.entry and found.halves(name)]
    assert found.halves(loop) == [2, 2, 2, 2]


@pytest.mark.parametrize("halves", [False, True])
def test_fsdp_reduces_all_arrays_of_a_layer_during_the_next_one(halves: bool) -> None:
    """Rather than at the end, where nothing is left to run beside, with all unreduced gradients kept until then."""

    def gradient(x: jax.Array, first: jax.Array, second: jax.Array) -> Any:
        def loss(x: jax.Array, *shards: jax.Array) -> jax.Array:
            return squares(
                fsdp.apply_layers(two_arrays, dict(zip(("first", "second"), shards, strict=True)), x, axis_name="x", halves=halves)
            )

        return jax.grad(loss, argnums=(0, 1, 2))(x, first, second)

    shards = (8, _WIDTH, _WIDTH)
    specs = P("x"), P(None, "x"), P(None, "x")
    found = schedule.compiled(gradient, schedule.mesh(x=2), specs, specs, (2 * _WIDTH, _WIDTH), shards, shards)
    (backward,) = [name for name in found.computations if name != found.entry and found.spans(*_REDUCTION, name)]
    assert len(found.spans(*_REDUCTION, backward)) == 4  # two layers a round
    assert min(found.spans(*_REDUCTION, backward)) >= 1
    assert not [i for i in found.instructions() if i.opcode == "reduce-scatter"]  # none that the program just waits for


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_transfers_beside_the_computation_of_the_same_tick(stages: int) -> None:
    def gradient(params: jax.Array, microbatches: jax.Array) -> jax.Array:
        loss = functools.partial(
            pipeline.loss,
            lambda params, microbatch: microbatch,
            lambda params, x: layer(params[0], x),
            lambda params, y, microbatch: squares(y),
            axis_name="x",
        )
        return jax.grad(loss)(params, microbatches)

    found = schedule.compiled(
        gradient, schedule.mesh(x=stages), (P("x"), P()), P("x"), (stages, _WIDTH, _WIDTH), (8, _WIDTH, _WIDTH), conditionals=True
    )
    (tick,) = [name for name in found.computations if found.halves(name)]
    cotangents, activations = found.halves(tick)
    assert cotangents >= 1
    assert activations >= 1


def test_gpipe_with_overlap() -> None:
    def program(params: jax.Array, microbatches: jax.Array) -> jax.Array:
        return pipeline.apply(lambda params, x: layer(params[0], x), params, microbatches, axis_name="x", overlap=True)

    shapes = (2, _WIDTH, _WIDTH), (8, _WIDTH, _WIDTH)
    found = schedule.compiled(program, schedule.mesh(x=2), (P("x"), P()), P("x"), *shapes, conditionals=True)
    (tick,) = [name for name in found.computations if found.halves(name)]
    assert found.halves(tick) == [1]
