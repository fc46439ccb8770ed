"""Trains a mixture of experts whose experts are spread over the devices, beside the same model computed densely, and compares the two.

    python examples/mixture_of_experts.py                     # 8 CPU devices, or the GPUs of this machine with --platform=cuda

Each device has some of the tokens and some of the experts. A router sends every token to its two best experts: `dispatch` moves the rows
to the devices of their experts by `hoccl_jax.ragged_all_to_all`, whose sizes only the router knows, the experts run as one
`jax.lax.ragged_dot`, and `combine` brings the results back the same way. The dense model runs each expert on each token and picks. In
each step both get the same parameters and tokens: the script ends with an error where their losses or gradients differ by more than
rounding.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tabulate import tabulate
from tqdm import tqdm

import hoccl_jax

FLAGS = flags.FLAGS
AXIS = "experts"
CHOICES = 2  # experts of a token
_TOLERANCE = 1e-3  # sums are made in different orders


class Params(NamedTuple):
    """Arrays, or their specs. `router` [width, experts] is the same everywhere; of the others each device has those of its experts."""

    router: Any
    up: Any  # [experts, width, 4 * width]
    down: Any  # [experts, 4 * width, width]


SPECS = Params(P(), P(AXIS), P(AXIS))


class Route(NamedTuple):
    """Where the rows of this device go, and where those that it gets come from. A slice is what one device sends to one expert."""

    order: jax.Array  # [tokens * CHOICES]: rows by expert
    weights: jax.Array  # [tokens, CHOICES]
    sent: jax.Array  # [experts]: rows of each slice that leaves, ...
    sent_from: jax.Array  # ... its first row here ...
    sent_to: jax.Array  # ... and at the device of its expert
    received: jax.Array  # [devices * experts of a device]: rows of each slice that comes, sender after sender, ...
    received_at: jax.Array  # ... its first row here ...
    returned_to: jax.Array  # ... and at its sender
    loads: jax.Array  # [experts of a device]: rows of each expert here


def route(x: jax.Array, router: jax.Array) -> Route:
    devices, device = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    experts = router.shape[1]
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), CHOICES)
    flat = chosen.reshape(-1)
    own = jnp.bincount(flat, length=experts).astype(jnp.int32)
    rows = hoccl_jax.all_gather(own, AXIS)  # [devices, experts]
    leaves = jnp.cumsum(rows, axis=1) - rows  # first row of each slice at its sender: by expert
    # At its receiver: by expert, then by sender.
    by_device = rows.reshape(devices, devices, -1)  # sender, receiver, expert there
    ends = jnp.cumsum(by_device.transpose(1, 2, 0).reshape(devices, -1), axis=1)
    arrives = (ends - by_device.transpose(1, 2, 0).reshape(devices, -1)).reshape(devices, -1, devices).transpose(2, 0, 1)
    return Route(
        order=jnp.argsort(flat),
        weights=weights / weights.sum(axis=1, keepdims=True),
        sent=own,
        sent_from=leaves[device],
        sent_to=arrives[device].reshape(-1),
        received=by_device[:, device].reshape(-1),
        received_at=arrives[:, device].reshape(-1),
        returned_to=leaves.reshape(by_device.shape)[:, device].reshape(-1),
        loads=by_device[:, device].sum(axis=0),
    )


def dispatch(x: jax.Array, to: Route) -> jax.Array:
    """[tokens, width] -> [devices * tokens * CHOICES, width], of which the first `sum(loads)` rows are meant for the experts here."""
    rows = jnp.take(x, to.order // CHOICES, axis=0)
    landing = jax.lax.pcast(jnp.zeros((jax.lax.axis_size(AXIS) * len(rows), x.shape[1]), x.dtype), AXIS, to="varying")
    return hoccl_jax.ragged_all_to_all(rows, landing, to.sent_from, to.sent, to.sent_to, to.received, axis_name=AXIS)


def combine(rows: jax.Array, to: Route) -> jax.Array:
    """What the experts made of the rows -> [tokens, width], weighted."""
    tokens = len(to.weights)
    landing = jax.lax.pcast(jnp.zeros((tokens * CHOICES, rows.shape[1]), rows.dtype), AXIS, to="varying")
    back = hoccl_jax.ragged_all_to_all(rows, landing, to.received_at, to.received, to.returned_to, to.sent, axis_name=AXIS)
    by_token = jnp.zeros_like(back).at[to.order].set(back).reshape(tokens, CHOICES, -1)
    return jnp.sum(by_token * to.weights[..., None], axis=1)


def mixture(params: Params, x: jax.Array) -> jax.Array:
    """The layer on a device's tokens x [tokens, width], within shard_map over AXIS."""
    to = route(x, params.router)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(dispatch(x, to), params.up, to.loads))
    return combine(jax.lax.ragged_dot(hidden, params.down, to.loads), to)


def dense(params: Params, x: jax.Array) -> jax.Array:
    """The same on all tokens and experts at once, without any communication."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params.router), CHOICES)
    weights /= weights.sum(axis=1, keepdims=True)
    every = jnp.einsum("teh,ehw->tew", jax.nn.gelu(jnp.einsum("tw,ewh->teh", x, params.up)), params.down)
    return jnp.einsum("tcw,tc->tw", jnp.take_along_axis(every, chosen[..., None], axis=1), weights)


def initial(width: int, experts: int, seed: int) -> Params:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((width, experts), (experts, width, 4 * width), (experts, 4 * width, width))
    return Params(*(jax.random.normal(key, shape) / np.sqrt(shape[-2]) for key, shape in zip(keys, shapes, strict=True)))


def batch(tokens: int, width: int, step: int) -> tuple[jax.Array, jax.Array]:
    """Tokens, and what is to be learnt of them: one of two linear maps, by the sign of the first element."""
    x = jax.random.normal(jax.random.key(1000 + step), (tokens, width))
    maps = jax.random.normal(jax.random.key(999), (2, width, width)) / np.sqrt(width)
    return x, jnp.where(x[:, :1] > 0, x @ maps[0], x @ maps[1])


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no such arguments: {argv[1:]}")
    if FLAGS.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices(FLAGS.platform)), AXIS)
    sharded = jax.shard_map(mixture, mesh=mesh, in_specs=(SPECS, P(AXIS)), out_specs=P(AXIS))

    def step(model: Any, params: Params, x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(lambda params: jnp.mean((model(params, x) - wanted) ** 2))(params)

    @jax.jit
    def update(params: Params, gradients: Params) -> Params:
        return jax.tree.map(lambda p, g: p - FLAGS.learning_rate * g, params, gradients)

    @jax.jit
    def difference(gradients: Params, reference: Params) -> jax.Array:
        """The largest one of a gradient, as a share of the gradient's largest element."""
        shares = jax.tree.map(lambda g, r: jnp.max(jnp.abs(g - r)) / jnp.max(jnp.abs(r)), gradients, reference)
        return jnp.max(jnp.stack(jax.tree.leaves(shares)))

    steps = {"mixture": jax.jit(functools.partial(step, sharded)), "dense": jax.jit(functools.partial(step, dense))}
    start = initial(FLAGS.width, mesh.size * FLAGS.experts, seed=0)
    params = jax.device_put(start, jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda x: isinstance(x, P)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for i in tqdm(range(FLAGS.steps), unit="step"):
        x, wanted = (jax.device_put(each, NamedSharding(mesh, P(AXIS))) for each in batch(mesh.size * FLAGS.tokens, FLAGS.width, i))
        gradients = {}
        for name, run in steps.items():
            began = time.perf_counter()
            loss, gradients[name] = jax.block_until_ready(run(params, x, wanted))
            times[name].append(time.perf_counter() - began)
            losses[name].append(float(loss))
        apart = abs(losses["mixture"][-1] / losses["dense"][-1] - 1), float(difference(gradients["mixture"], gradients["dense"]))
        if not all(each <= _TOLERANCE for each in apart):  # nor are they NaN
            raise SystemExit(f"step {i}: the losses or gradients differ, by {apart[0]:.1e} and {apart[1]:.1e} of their size")
        params = update(params, gradients["mixture"])
    rows = [[name, losses[name][0], losses[name][-1], 1e3 * statistics.median(times[name])] for name in steps]
    print(tabulate(rows, ["model", "first loss", "last loss", "ms a step"], "github"))
    print(f"equal up to rounding over {FLAGS.steps} steps; {hoccl_jax.stats()['operations']['ragged_all_to_all']} ragged operations")


if __name__ == "__main__":  # users may import this module beside others with flags
    flags.DEFINE_integer("steps", 100, "Optimiser steps.", lower_bound=1)
    flags.DEFINE_integer("tokens", 64, "Tokens of a device in a step.", lower_bound=1)
    flags.DEFINE_integer("width", 32, "Width of a token.", lower_bound=1)
    flags.DEFINE_integer("experts", 2, "Experts of a device.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 0.3, "Learning rate of plain gradient descent.")
    flags.DEFINE_enum("platform", "cpu", ["cpu", "cuda"], "Devices to run on.")
    app.run(main)
