"""Layers with sharded parameters: values and gradients are those of the same layers gathered one by one by jax.lax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax.parallel import fsdp

_AXES = {"w": 1, "b": 0}
_SPECS = {"w": P(None, None, "fsdp"), "b": P(None, "fsdp")}


def layer(params: Any, x: Any) -> Any:
    """Exact in small integers. The activations are a pytree."""
    return {"x": x["x"] @ params["w"] - params["b"], "count": x["count"] + 1}


def operands(layers: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(layers)
    params = {"w": rng.integers(-1, 2, (layers, 8, 8)), "b": rng.integers(-2, 3, (layers, 8))}
    x = {"x": rng.integers(-2, 3, (8, 8)), "count": np.zeros(4)}
    return jax.tree.map(lambda value: value.astype(np.float32), (params, x))


def gathered_one_by_one(shards: Any, x: Any) -> Any:
    for index in range(shards["b"].shape[0]):
        params = {name: lax.all_gather(shards[name][index], "fsdp", axis=_AXES[name], tiled=True) for name in shards}
        x = layer(params, x)
    return x


def stack(shards: Any, x: Any) -> Any:
    return fsdp.apply_layers(layer, shards, x, axis_name="fsdp", axis=_AXES)


def halves(shards: Any, x: Any) -> Any:
    return fsdp.apply_layers(layer, shards, x, axis_name="fsdp", axis=_AXES, halves=True)


def sequence(shards: Any, x: Any) -> Any:
    layers = [jax.tree.map(lambda leaf, index=index: leaf[index], shards) for index in range(shards["b"].shape[0])]
    return fsdp.apply_layers(layer, layers, x, axis_name="fsdp", axis=_AXES, all_gather=lax.all_gather)


@pytest.mark.parametrize(("layers", "check_vma"), [(1, True), (2, True), (5, True), (6, False)])
def test_equals_the_layers_gathered_one_by_one(layers: int, check_vma: bool) -> None:
    def both(shards: Any, x: Any) -> Any:
        results = []
        for function in (gathered_one_by_one, stack, halves, sequence):
            y, pull = jax.vjp(function, shards, x)
            results.append((y, *pull(y)))
        return results

    mesh = Mesh(np.array(jax.devices()[:4]), "fsdp")
    specs = (_SPECS, {"x": P("fsdp"), "count": P("fsdp")})
    out_specs = [(specs[1], *specs)] * 4
    program = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    expected, *others = jax.jit(program)(*operands(layers))
    for result in others:
        jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.parametrize("layers", [1, 4])
def test_integers_among_parameters_and_activations(layers: int) -> None:
    """They are gathered and passed on with what has gradients, and have none."""
    rng = np.random.default_rng(layers)
    weights = rng.integers(-2, 3, (layers, 8)).astype(np.float32)
    shifts = rng.integers(0, 8, (layers, 8)).astype(np.int32)
    x = {"x": rng.integers(-2, 3, (4, 8)).astype(np.float32), "number": np.arange(4, dtype=np.int32)}

    def layer(params: Any, x: Any) -> Any:
        return {"x": x["x"] * params["weight"] + x["number"][:, None] * params["shift"], "number": x["number"] + params["shift"][0]}

    def loss(y: Any) -> jax.Array:
        return jnp.sum(y["x"] * y["number"][:, None])

    def alone(weights: jax.Array, x: Any) -> jax.Array:
        for index in range(layers):
            x = layer({"weight": weights[index], "shift": shifts[index]}, x)
        return loss(x)

    def sharded(weights: jax.Array, rows: jax.Array, shifts: jax.Array, number: jax.Array) -> Any:
        def value(weights: jax.Array, rows: jax.Array, *, listed: bool, halves: bool) -> jax.Array:
            shards: Any = {"weight": weights, "shift": shifts}
            if listed:
                shards = [jax.tree.map(lambda leaf, index=index: leaf[index], shards) for index in range(layers)]
            return loss(fsdp.apply_layers(layer, shards, {"x": rows, "number": number}, axis_name="fsdp", halves=halves))

        ways = [functools.partial(value, listed=listed, halves=halves) for listed in (False, True) for halves in (False, True)]
        results = [jax.value_and_grad(way, (0, 1))(weights, rows) for way in ways]
        return [(lax.psum(part, "fsdp"), gradients) for part, gradients in results]

    specs = P(None, "fsdp"), P("fsdp"), P(None, "fsdp"), P("fsdp")
    mesh = Mesh(np.array(jax.devices()[:4]), "fsdp")
    program = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=[(P(), specs[:2])] * 4)
    value, (of_weights, of_x) = jax.value_and_grad(alone, (0, 1), allow_int=True)(weights, x)
    for result in jax.jit(program)(weights, x["x"], shifts, x["number"]):
        jax.tree.map(np.testing.assert_array_equal, result, (value, (of_weights, of_x["x"])))


@pytest.mark.parametrize("halves_", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_what_nothing_uses_and_what_vmap_leaves_alone(listed: bool, halves_: bool) -> None:
    """A parameter that the layer ignores, an output that only the gradient would need, and parameters beside batched activations."""
    rng = np.random.default_rng(0)
    params = {"w": rng.integers(-1, 2, (3, 8, 8)).astype(np.float32), "ignored": np.zeros((3, 8), np.float32)}
    x = rng.integers(-2, 3, (5, 4, 8)).astype(np.float32)

    def network(params: Any, x: jax.Array) -> jax.Array:
        shards = [jax.tree.map(lambda leaf, index=index: leaf[index], params) for index in range(3)] if listed else params
        return fsdp.apply_layers(lambda params, x: x @ params["w"], shards, x, axis_name="fsdp", halves=halves_)

    def alone(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda x: functools.reduce(jnp.matmul, params["w"], x))(x))

    def body(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda params: jnp.sum(jax.vmap(network, (None, 0))(params, x)))(params)

    specs = P(None, "fsdp"), P(None, "fsdp")
    program = jax.shard_map(body, mesh=Mesh(np.array(jax.devices()[:4]), "fsdp"), in_specs=specs, out_specs=specs[0])
    jax.tree.map(np.testing.assert_array_equal, jax.jit(program)(params, x), jax.grad(alone)(params, x))


def test_parameters_are_gathered_once_a_pass_and_not_kept() -> None:
    """The backward pass gathers anew; what is kept has the size of shards and activations."""
    mesh = Mesh(np.array(jax.devices()[:4]), "fsdp")
    shards, x = operands(5)
    specs = _SPECS, {"x": P("fsdp"), "count": P("fsdp")}

    def curved(params: Any, x: Any) -> Any:
        return jax.tree.map(jnp.sin, layer(params, x))

    def network(shards: Any, x: Any) -> Any:
        return fsdp.apply_layers(curved, shards, x, axis_name="fsdp", axis=_AXES)

    def both_passes(shards: Any, x: Any) -> Any:
        y, pull = jax.vjp(network, shards, x)
        return y, pull(y)

    hoccl_jax.init()
    hoccl_jax.reset_stats()
    program = jax.shard_map(both_passes, mesh=mesh, in_specs=specs, out_specs=(specs[1], specs))
    jax.block_until_ready(jax.jit(program)(shards, x))
    assert hoccl_jax.stats()["operations"]["all_gather"] == 4 * 2 * (5 + 5)  # devices x arrays x (forward + backward)

    def kept(shards: Any, x: Any) -> Any:
        return [leaf.reshape(-1) for leaf in jax.tree.leaves(jax.vjp(network, shards, x)[1])]

    kept_bytes = jax.eval_shape(jax.shard_map(kept, mesh=mesh, in_specs=specs, out_specs=P("fsdp")), shards, x)
    assert sum(leaf.size for leaf in kept_bytes) <= sum(leaf.size for leaf in jax.tree.leaves(shards)) + 5 * (8 * 8 + 4)


@pytest.mark.parametrize("shards", [[], {"a": jnp.zeros((0, 4))}, {"a": jnp.zeros((1, 4)), "b": jnp.zeros((2, 4))}])
def test_the_number_of_layers_must_be_clear(shards: Any) -> None:
    with pytest.raises(ValueError, match="shards must hold one or more layers"):
        fsdp.apply_layers(layer, shards, jnp.zeros(4), axis_name="fsdp")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            [{"w": jnp.zeros(4)}, {"w": jnp.zeros(4), "scale": jnp.zeros(())}],
            r"shards\[1\]\['scale'\] has shape \(\), but needs a dimension",
        ),
        ({"w": jnp.zeros((2, 4)), "scale": jnp.zeros(2)}, r"shards\['scale'\] has shape \(2,\), .* beside that of layers"),
    ],
)
def test_what_cannot_be_sharded_is_named(shards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fsdp.apply_layers(layer, shards, jnp.zeros(4), axis_name="fsdp")
