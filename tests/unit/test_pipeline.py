"""Pipelines: loss and gradients are those of the stages one after the other on a single device, by every schedule."""

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
from hoccl_jax.parallel import pipeline

_PARAM_SPECS = {"embed": P(), "w": P("stage"), "head": P()}

# All exact in small integers. Activations are a pytree; the microbatches have differentiable parts and others.


def enter(params: Any, microbatch: Any) -> Any:
    return (microbatch["x"] @ params["embed"], microbatch["x"])


def stage(params: Any, x: Any) -> Any:
    return (x[0] @ params["w"] - x[0], x[1])


def leave(params: Any, y: Any, microbatch: Any) -> jax.Array:
    return jnp.sum((y[0] @ params["head"] - microbatch["target"]) * microbatch["weight"]) + jnp.sum(y[1])


def operands(stages: int, count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(stages)

    def small(*shape: int) -> np.ndarray:
        return rng.integers(-1, 2, shape).astype(np.float32)

    params = {"embed": small(3, 4), "w": small(stages, 4, 4), "head": small(4, 2)}
    microbatches = {"x": small(count, 5, 3), "target": small(count, 5, 2), "weight": rng.integers(0, 3, (count, 5, 1))}
    return params, microbatches


def with_x(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """With the differentiable part of the microbatches as an argument of its own."""
    return lambda params, x, microbatches: function(params, {**microbatches, "x": x})


def one_after_the_other(params: Any, microbatches: Any) -> jax.Array:
    total = jnp.zeros(())
    for index in range(microbatches["x"].shape[0]):
        microbatch = jax.tree.map(lambda leaf, index=index: leaf[index], microbatches)
        x = enter(params, microbatch)
        for w in params["w"]:
            x = stage({"w": w}, x)
        total += leave(params, x, microbatch)
    return total


def pipelined(params: Any, microbatches: Any, **how: Any) -> jax.Array:
    own = params | {"w": params["w"][0]}
    return pipeline.loss(enter, stage, leave, own, microbatches, axis_name="stage", **how)


def mesh(stages: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:stages]), "stage")


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 1), (3, 7), (4, 2)])
def test_loss_and_gradients_of_all_schedules(stages: int, count: int) -> None:
    params, microbatches = operands(stages, count)
    expected = jax.jit(jax.value_and_grad(with_x(one_after_the_other), argnums=(0, 1)))(params, microbatches["x"], microbatches)
    ways: list[dict[str, Any]] = [{"schedule": "gpipe"}, {}, {"schedule": "gpipe", "ppermute": lax.ppermute}, {"ppermute": lax.ppermute}]

    def body(params: Any, x: Any, microbatches: Any) -> Any:
        results = []
        for how in ways:
            function = with_x(functools.partial(pipelined, **how))
            value, gradients = jax.value_and_grad(function, argnums=(0, 1))(params, x, microbatches)
            results.append((lax.psum(value, "stage"), gradients))
        return results, lax.psum(pipelined(params, {**microbatches, "x": x}), "stage")

    out_specs = [(P(), (_PARAM_SPECS, P()))] * len(ways), P()
    program = jax.shard_map(body, mesh=mesh(stages), in_specs=(_PARAM_SPECS, P(), P()), out_specs=out_specs)
    results, value = jax.jit(program)(params, microbatches["x"], microbatches)
    for result in results:
        same(result, expected)
    same(value, expected[0])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_integers_among_parameters_and_activations(schedule: Any) -> None:
    """They go through the pipeline with what has gradients, and have none. So do random keys, and what is alike on all stages."""
    count, stages = 3, 3
    microbatches = {"x": np.arange(count * 4, dtype=np.float32).reshape(count, 4), "number": np.arange(count, dtype=np.int32)}
    weights, steps = np.array([[2.0], [3.0], [-1.0]], np.float32), np.array([[1], [2], [3]], np.int32)

    def enter(params: Any, microbatch: Any) -> Any:
        number = microbatch["number"] + params["first"]
        return {"x": microbatch["x"] * params["weight"], "number": number, "key": jax.random.key(3), "alike": jnp.float32(2)}

    def stage(params: Any, x: Any) -> Any:
        noise = jax.random.randint(x["key"], (4,), 0, 3)
        scaled = (x["x"] + noise) * params["weight"] * x["number"] * x["alike"]
        return x | {"x": scaled, "number": x["number"] + params["step"][0], "alike": jnp.float32(2)}

    def leave(params: Any, y: Any, microbatch: Any) -> jax.Array:
        return jnp.sum(y["x"] * y["number"]) * microbatch["number"]

    def loss(weight: jax.Array, step: jax.Array, microbatches: Any) -> jax.Array:
        params = {"weight": weight, "step": step, "first": 5}
        return pipeline.loss(enter, stage, leave, params, microbatches, axis_name="stage", schedule=schedule)

    def alone(weights: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for index in range(count):
            microbatch = jax.tree.map(lambda leaf, index=index: leaf[index], microbatches)
            x = enter({"weight": weights[0], "first": 5}, microbatch)
            for weight, step in zip(weights, steps, strict=True):
                x = stage({"weight": weight, "step": step}, x)
            total += leave(None, x, microbatch)
        return total

    def body(weights: jax.Array, steps: jax.Array, microbatches: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights[0], steps[0], microbatches)
        return lax.psum(value, "stage"), gradient[None]

    program = jax.shard_map(body, mesh=mesh(stages), in_specs=(P("stage"), P("stage"), P()), out_specs=(P(), P("stage")))
    same(jax.jit(program)(weights, steps, microbatches), jax.value_and_grad(alone)(weights))


def test_without_check_vma_gradients_are_those_of_each_stage() -> None:
    params, microbatches = operands(3, 4)
    expected = jax.grad(one_after_the_other)(params, jax.tree.map(jnp.asarray, microbatches))

    def body(params: Any, microbatches: Any) -> Any:
        gradients = jax.grad(pipelined)(params, microbatches)
        return gradients | {name: lax.psum(gradients[name], "stage") for name in ("embed", "head")}

    program = jax.shard_map(body, mesh=mesh(3), in_specs=(_PARAM_SPECS, P()), out_specs=_PARAM_SPECS, check_vma=False)
    same(jax.jit(program)(params, microbatches), expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_apply_passes_microbatches_through_all_stages(overlap: bool) -> None:
    rng = np.random.default_rng(0)
    w, x = (rng.integers(-1, 2, shape).astype(np.float32) for shape in ((4, 4, 4), (6, 2, 4)))

    def whole(w: Any, x: Any) -> Any:
        for one in w:
            x = x @ one
        return x

    def piped(w: Any, x: Any) -> Any:
        return pipeline.apply(lambda w, x: x @ w, w[0], x, axis_name="stage", overlap=overlap)

    def body(w: Any, x: Any) -> Any:
        y, pull = jax.vjp(piped, w, x)
        return lax.psum(y, "stage"), pull(y)

    y, pull = jax.vjp(whole, w, x)
    program = jax.shard_map(body, mesh=mesh(4), in_specs=(P("stage"), P()), out_specs=(P(), (P("stage"), P())))
    same(jax.jit(program)(w, x), (y, pull(y)))


def test_1f1b_keeps_no_more_microbatches_than_the_pipeline_holds() -> None:
    """The memory of the program grows by the microbatches themselves, not by their activations."""

    def temporary_bytes(count: int, schedule: Any) -> int:
        params, microbatches = operands(2, count)
        wide = params | {"embed": np.ones((3, 1024), np.float32), "head": np.ones((1024, 2), np.float32)}
        wide["w"] = np.ones((2, 1, 1), np.float32)

        def scaled(params: Any, x: Any) -> Any:
            return (jnp.sin(x[0] * params["w"]), x[1])

        def body(params: Any, microbatches: Any) -> Any:
            own = params | {"w": params["w"][0]}
            function = functools.partial(pipeline.loss, enter, scaled, leave, axis_name="stage", schedule=schedule)
            return jax.grad(function)(own, microbatches)["w"][None]

        program = jax.shard_map(body, mesh=mesh(2), in_specs=(_PARAM_SPECS, P()), out_specs=P("stage"))
        analysis = jax.jit(program).lower(wide, microbatches).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    activation = 5 * 1024 * 4
    growth = {schedule: temporary_bytes(40, schedule) - temporary_bytes(8, schedule) for schedule in ("1f1b", "gpipe")}
    assert growth["1f1b"] < activation
    assert growth["gpipe"] > 32 * activation


def test_stages_skip_what_they_have_no_work_for() -> None:
    """The stage's function runs for microbatches alone, not in the ticks that fill and drain the pipeline."""
    calls: list[int] = []

    def counted(params: Any, x: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return stage(params, x)

    def body(params: Any, microbatches: Any) -> Any:
        own = params | {"w": params["w"][0]}
        return lax.psum(pipeline.loss(enter, counted, leave, own, microbatches, axis_name="stage"), "stage")

    program = jax.shard_map(body, mesh=mesh(3), in_specs=(_PARAM_SPECS, P()), out_specs=P())
    jax.block_until_ready(jax.jit(program)(*operands(3, 4)))
    jax.effects_barrier()
    assert len(calls) == 3 * 4


def test_errors_name_the_argument() -> None:
    params, microbatches = operands(2, 3)

    def run(**how: Any) -> None:
        program = jax.shard_map(
            lambda params, microbatches: lax.psum(pipelined(params, microbatches, **how), "stage"),
            mesh=mesh(2),
            in_specs=(_PARAM_SPECS, P()),
            out_specs=P(),
        )
        jax.jit(program)(params, microbatches)

    with pytest.raises(ValueError, match="schedule must be 1f1b or gpipe, got 'zero'"):
        run(schedule="zero")
    microbatches["weight"] = microbatches["weight"][:2]
    with pytest.raises(ValueError, match=r"microbatches must be arrays .* got \[2, 3\]"):
        run()
    microbatches = jax.tree.map(lambda leaf: leaf[:0], operands(2, 3)[1])
    with pytest.raises(ValueError, match=r"microbatches must be arrays .* got \[0\]"):
        run()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_from_outside_of_a_jitted_program(schedule: Any) -> None:
    params, microbatches = operands(2, 3)

    def summed(params: Any, microbatches: Any) -> jax.Array:
        return lax.psum(pipelined(params, microbatches, schedule=schedule), "stage")

    program = jax.jit(jax.shard_map(summed, mesh=mesh(2), in_specs=(_PARAM_SPECS, P()), out_specs=P()))
    wanted = jax.grad(one_after_the_other)(params, microbatches)
    found = jax.grad(program)(params, microbatches)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_errors_say_what_a_function_returns(schedule: Any) -> None:
    params, microbatches = operands(2, 4)
    mesh = Mesh(np.array(jax.devices()[:2]), "stage")

    def total(stage: Any, leave: Any) -> jax.Array:
        def body(params: Any, microbatches: Any) -> jax.Array:
            own = {**params, "w": params["w"][0]}
            return pipeline.loss(enter, stage, leave, own, microbatches, axis_name="stage", schedule=schedule)[None]

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(_PARAM_SPECS, P()), out_specs=P("stage")))(params, microbatches)

    with pytest.raises(ValueError, match=r"stage must keep .* takes .*float32\[5,4\].* returns .*float32\[5,2\]"):
        total(lambda params, x: (x[0] @ params["head"], x[1]), leave)
    with pytest.raises(ValueError, match=r"leave must return a floating-point scalar.*float32\[5,4\]"):
        total(stage, lambda params, y, microbatch: y[0])
    with pytest.raises(ValueError, match=r"leave must return a floating-point scalar.*int32\[\]"):
        total(stage, lambda params, y, microbatch: jnp.int32(0))


def test_apply_says_what_a_stage_returns() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), "stage")
    narrow = functools.partial(pipeline.apply, lambda params, x: x[:, :2], None, axis_name="stage")
    with pytest.raises(ValueError, match=r"stage must keep .* takes float32\[3,4\] and returns float32\[3,2\]"):
        jax.jit(jax.shard_map(narrow, mesh=mesh, in_specs=P(), out_specs=P("stage")))(jnp.ones((5, 3, 4)))


def test_the_default_moves_data_by_our_ppermute() -> None:
    params, microbatches = operands(2, 3)
    program = jax.shard_map(
        lambda params, microbatches: jax.grad(pipelined)(params, microbatches)["w"],
        mesh=mesh(2),
        in_specs=(_PARAM_SPECS, P()),
        out_specs=P("stage"),
    )
    hoccl_jax.init()
    hoccl_jax.reset_stats()
    jax.block_until_ready(jax.jit(program)(params, microbatches))
    ticks, arrays, directions = 3 + 2 * (2 - 1), 2, 2
    assert hoccl_jax.stats()["operations"]["ppermute"] == 2 * ticks * arrays * directions
