"""A pipeline of four programs that differ, each of one process, and the same model as one program over all devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from tests.multiprocess.programs.common import mesh_of, report

MICROBATCHES, ROWS, WIDTH, STEPS, RATE = 4, 8, 16, 8, 0.02
BACK = 100  # tags of cotangents begin here, those of activations at 0

# The stages: what each makes of its input, and its parameters' shapes. The last one's is the loss of a microbatch.


def embed(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def widen(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


def residual(params: Any, x: jax.Array) -> jax.Array:
    return x + params["scale"] * jax.nn.gelu(x)


def loss(params: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] - wanted) ** 2)


STAGES: list[Callable[..., jax.Array]] = [embed, widen, residual, loss]
SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"w": (4, WIDTH), "b": (WIDTH,)},
    {"up": (WIDTH, 3 * WIDTH), "down": (3 * WIDTH, WIDTH)},
    {"scale": (WIDTH,)},
    {"w": (WIDTH, 2)},
]


def initial(stage: int) -> Any:
    random = np.random.default_rng(stage)
    return {name: random.normal(size=shape).astype(np.float32) / np.float32(2) for name, shape in SHAPES[stage].items()}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """[microbatches, rows, ...]: inputs, and what is to be learnt of them."""
    x = np.random.default_rng(1000 + step).normal(size=(MICROBATCHES, ROWS, 4)).astype(np.float32)
    return x, np.stack([np.sin(x[..., 0]), x[..., 1] * x[..., 2]], axis=-1)


def updated(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)


def program(stage: int) -> Any:
    """One step of a stage: (params, its part of the batch) -> (params, the loss or zero)."""
    devices = jax.devices()
    before, after = (devices[stage - 1] if stage else None), (devices[stage + 1] if stage < len(STAGES) - 1 else None)
    like = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)

    def step(params: Any, data: jax.Array) -> tuple[Any, jax.Array]:
        pulls, total = [], jnp.float32(0)
        for i in range(MICROBATCHES):
            x = data[i] if before is None else hoccl_jax.recv(like, before, tag=i)
            if after is None:
                y, pull = jax.vjp(lambda params, x, i=i: STAGES[stage](params, x, data[i]) / MICROBATCHES, params, x)
                total += y
            else:
                y, pull = jax.vjp(STAGES[stage], params, x)
                hoccl_jax.send(y, after, tag=i)
            pulls.append(pull)
        gradients = jax.tree.map(jnp.zeros_like, params)
        for i, pull in enumerate(pulls):
            bar = jnp.float32(1) if after is None else hoccl_jax.recv(like, after, tag=BACK + i)
            of_params, of_x = pull(bar)
            if before is not None:
                hoccl_jax.send(of_x, before, tag=BACK + i)
            gradients = jax.tree.map(jnp.add, gradients, of_params)
        return updated(params, gradients), total

    return jax.jit(step)


def pipelined() -> list[float]:
    stage = jax.process_index()
    step, params, losses = program(stage), jax.device_put(initial(stage), jax.local_devices()[0]), []
    for i in range(STEPS):
        x, wanted = batch(i)
        params, total = step(params, jax.device_put(wanted if stage == len(STAGES) - 1 else x, jax.local_devices()[0]))
        losses.append(float(total))
    return losses


def whole() -> list[float]:
    """As one program, with the rows of the batch spread over the devices."""
    mesh = mesh_of(range(len(STAGES)))

    def model(params: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for stage, own in zip(STAGES[:-1], params[:-1], strict=True):
            x = stage(own, x)
        return jax.lax.pmean(loss(params[-1], x, wanted), "x")

    sharded = jax.shard_map(model, mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P())

    @jax.jit
    def step(params: Any, x: jax.Array, wanted: jax.Array) -> tuple[Any, jax.Array]:
        total, gradients = jax.value_and_grad(sharded)(params, x, wanted)
        return updated(params, gradients), total

    def placed(values: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

    params: Any = jax.tree.map(lambda values: placed(values, P()), [initial(stage) for stage in range(len(STAGES))])
    losses = []
    for i in range(STEPS):
        x, wanted = (placed(values.reshape(MICROBATCHES * ROWS, -1), P("x")) for values in batch(i))
        params, total = step(params, x, wanted)
        losses.append(float(total))
    return losses


def main() -> None:
    hoccl_jax.init()
    losses = pipelined()
    report(pipelined=losses, whole=whole(), stats=hoccl_jax.stats())


if __name__ == "__main__":
    main()
