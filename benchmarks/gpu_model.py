"""A GPT without learned norm scales, and its training steps, fully sharded or as a pipeline, for benchmarks/gpu_training.py.

A token is a byte of Python's own language reference. All functions of parameters run inside `shard_map` over one mesh axis, "x".
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pydoc_data.topics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from hoccl_jax.parallel import fsdp, pipeline

_VOCABULARY = 256
_RATE = 0.05

Gather = Callable[..., jax.Array]
Apply = Callable[[Any, jax.Array], jax.Array]  # (layers' shards, activations) -> activations


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int
    sequence: int
    sequences: int  # in a batch of one device, or in a microbatch
    dtype: Any = jnp.bfloat16

    @property
    def heads(self) -> int:
        return max(1, self.width // 128)

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        w = self.width
        return {"qkv": (w, 3 * w), "proj": (w, w), "up": (w, 4 * w), "down": (4 * w, w)}

    @property
    def ends_shapes(self) -> dict[str, tuple[int, int]]:
        return {"embed": (_VOCABULARY, self.width), "position": (self.sequence, self.width), "head": (self.width, _VOCABULARY)}

    @property
    def ends_size(self) -> int:
        return sum(math.prod(shape) for shape in self.ends_shapes.values())


def ends_of(config: Config, flat: jax.Array) -> dict[str, jax.Array]:
    sizes = np.cumsum([math.prod(shape) for shape in config.ends_shapes.values()])
    return {
        name: part.reshape(config.ends_shapes[name]) for name, part in zip(config.ends_shapes, jnp.split(flat, sizes[:-1]), strict=True)
    }


def _normal(key: jax.Array, shape: tuple[int, ...], scale: float, dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)


@functools.cache
def initial(config: Config, mesh: Mesh, *, stages: bool) -> Callable[[], Any]:
    """Makes {"layers", "ends"}: arrays [layers, rows, columns] cut along rows, one vector; or, of each stage, its own [stages, ...]."""
    lead = (mesh.size, config.layers) if stages else (config.layers,)
    spec = P("x") if stages else P(None, "x")

    def values() -> Any:
        keys = jax.random.split(jax.random.key(0), len(config.layer_shapes) + 1)
        layers = {
            name: _normal(key, (*lead, *shape), 0.5 / math.sqrt(shape[0]), config.dtype)
            for key, (name, shape) in zip(keys, config.layer_shapes.items(), strict=False)
        }
        ends = (mesh.size, config.ends_size) if stages else (config.ends_size,)
        return {"layers": layers, "ends": _normal(keys[-1], ends, 0.5 / math.sqrt(config.width), config.dtype)}

    shardings = {"layers": dict.fromkeys(config.layer_shapes, NamedSharding(mesh, spec)), "ends": NamedSharding(mesh, P("x"))}
    return jax.jit(values, out_shardings=shardings)


def tokens(config: Config, mesh: Mesh, count: int, spec: P) -> jax.Array:
    """int32 [count, sequences, sequence + 1]: parts of the text."""
    text = np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - config.sequence - 1, size=(count, config.sequences, 1))
    values = text[starts + np.arange(config.sequence + 1)].astype(np.int32)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def _normalise(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer(config: Config, p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """[sequences, sequence, width] -> the same shape."""
    heads = (*x.shape[:2], config.heads, x.shape[2] // config.heads)
    q, k, v = (part.reshape(heads) for part in jnp.split(_normalise(x) @ p["qkv"], 3, axis=-1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["proj"]
    return x + jax.nn.gelu(_normalise(x) @ p["up"]) @ p["down"]


def embed(ends: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return ends["embed"][batch[:, :-1]] + ends["position"]


def next_token_loss(ends: dict[str, jax.Array], x: jax.Array, batch: jax.Array) -> jax.Array:
    """Mean cross entropy, nats per token."""
    logits = (_normalise(x) @ ends["head"]).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], axis=-1))


def _updated(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: (p.astype(jnp.float32) - _RATE * g.astype(jnp.float32)).astype(p.dtype), params, gradients)


def by_helper(config: Config, all_gather: Gather, halves: bool = False) -> Apply:
    """The schedule of hoccl_jax.parallel.fsdp."""
    options: dict[str, Any] = {"axis_name": "x", "all_gather": all_gather, "halves": halves}
    return lambda shards, x: fsdp.apply_layers(functools.partial(layer, config), shards, x, **options)


def _plain(config: Config, all_gather: Gather, prevent_cse: bool) -> Callable[[jax.Array, Any], jax.Array]:
    """A layer that gathers its own parameters, again in the backward pass."""

    def gathered(x: jax.Array, shard: Any) -> jax.Array:
        return layer(config, jax.tree.map(lambda array: all_gather(array, "x", tiled=True), shard), x)

    return jax.checkpoint(gathered, prevent_cse=prevent_cse)


def by_scan(config: Config, all_gather: Gather) -> Apply:
    body = _plain(config, all_gather, prevent_cse=False)
    return lambda shards, x: lax.scan(lambda x, shard: (body(x, shard), None), x, shards)[0]


def by_loop(config: Config, all_gather: Gather) -> Apply:
    body = _plain(config, all_gather, prevent_cse=True)

    def apply(shards: Any, x: jax.Array) -> jax.Array:
        for number in range(config.layers):
            x = body(x, jax.tree.map(lambda array, number=number: array[number], shards))
        return x

    return apply


@jax.custom_vjp
def _own(whole: jax.Array, shard: jax.Array) -> jax.Array:
    """The whole parameters where they are already; the gradient goes to the shard's place, without a reduction."""
    return lax.pcast(whole, "x", to="varying")


def _own_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole, shard = residuals
    rows = shard.shape[0]
    return jnp.zeros_like(whole), lax.dynamic_slice_in_dim(gradient, lax.axis_index("x") * rows, rows)


_own.defvjp(lambda whole, shard: (_own(whole, shard), (whole, shard)), _own_backward)


def without_transfers(config: Config, whole: Any) -> Apply:
    """The same computation with whole parameters on each device: neither gathers nor reductions."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(x: jax.Array, operands: tuple[Any, Any]) -> jax.Array:
        return layer(config, jax.tree.map(_own, *operands), x)

    return lambda shards, x: lax.scan(lambda x, operands: (body(x, operands), None), x, (whole, shards), unroll=2)[0]


def fsdp_gradient(config: Config, apply: Apply, all_gather: Gather, params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
    """(this device's part of the loss, gradients as the parameters are sharded). batch: int32 [1, sequences, sequence + 1]."""

    def loss(params: Any) -> jax.Array:
        ends = ends_of(config, all_gather(params["ends"], "x", tiled=True))
        x = apply(params["layers"], embed(ends, batch[0]))
        return next_token_loss(ends, x, batch[0]) / lax.axis_size("x")

    return jax.value_and_grad(loss)(params)


def pipeline_gradient(config: Config, ppermute: Any, params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
    """The same, by 1F1B. params: [1, ...] of this stage; batch: int32 [microbatches, sequences, sequence + 1]."""

    def stage(params: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, p: (layer(config, p, x), None), x, params["layers"])[0]

    def loss(params: Any) -> jax.Array:
        own = jax.tree.map(lambda array: array[0], params)
        whole = {"layers": own["layers"], "ends": ends_of(config, own["ends"])}
        total = pipeline.loss(
            lambda params, part: embed(params["ends"], part),
            stage,
            lambda params, y, part: next_token_loss(params["ends"], y, part),
            whole,
            batch,
            axis_name="x",
            ppermute=ppermute,
        )
        return total / batch.shape[0]

    return jax.value_and_grad(loss)(params)


FSDP_SPECS = {"layers": P(None, "x"), "ends": P("x")}


def fsdp_step(config: Config, mesh: Mesh, form: str) -> Any:
    """(parameters, batch[, whole layers]) -> (new parameters, parts of the loss [devices]), jitted; the first argument is donated."""
    all_gather = hoccl_jax.all_gather if form.startswith("hoccl_jax") else lax.all_gather
    forms: dict[str, Callable[[], Apply]] = {
        "hoccl_jax": lambda: by_helper(config, all_gather),
        "hoccl_jax halves": lambda: by_helper(config, all_gather, halves=True),
        "jax.lax helper": lambda: by_helper(config, all_gather),
        "jax.lax scan": lambda: by_scan(config, all_gather),
        "jax.lax loop": lambda: by_loop(config, all_gather),
    }

    def step(params: Any, batch: jax.Array, *whole: Any) -> Any:
        apply = without_transfers(config, whole[0]) if whole else forms[form]()
        loss, gradients = fsdp_gradient(config, apply, all_gather, params, batch)
        return _updated(params, gradients), loss[None]

    specs = (FSDP_SPECS, P("x"), *([P()] if form == "compute alone" else []))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(FSDP_SPECS, P("x"))), donate_argnums=0)


def pipeline_step(config: Config, mesh: Mesh, form: str) -> Any:
    """The same by 1F1B; parameters [stages, ...], the batch on all stages."""
    ppermute = None if form == "hoccl_jax" else lax.ppermute

    def step(params: Any, batch: jax.Array) -> Any:
        loss, gradients = pipeline_gradient(config, ppermute, params, batch)
        return _updated(params, gradients), loss[None]

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")), donate_argnums=0)
