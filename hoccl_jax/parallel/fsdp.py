"""Fully sharded data parallelism: a layer's parameters are gathered just before use, during the layer before.

    def layer(params, x): ...                        # any function; params as a single device would have them
    y = fsdp.apply_layers(layer, shards, x, axis_name="fsdp")

In the forward pass the parameters of layer i + 1 are gathered while layer i computes. Nothing but the inputs of layers is kept for the
backward pass: it gathers again, those of layer i - 1 while the gradient of layer i is computed, and reduces the gradients of layer i + 1
meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hoccl_jax import collectives, futures
from hoccl_jax.futures import prefetch_barrier
from hoccl_jax.parallel.differentiable import merge, part, split

Layer = Callable[[Any, Any], Any]  # (parameters, activations) -> activations


class _Options(NamedTuple):
    axis_name: Any
    axis: Any
    all_gather: Callable[..., jax.Array]
    halves: bool


def apply_layers(
    layer: Layer,
    shards: Any,
    x: Any,
    *,
    axis_name: Any,
    axis: Any = 0,
    all_gather: Callable[..., jax.Array] = collectives.all_gather,
    halves: bool = False,
) -> Any:
    """Applies layers one after the other, `x = layer(params, x)`, gathering each one's parameters during the layer before.

    Differentiable in the floating-point arrays of shards and x. A layer is computed again in the backward pass, as under jax.checkpoint,
    so that neither its parameters nor its intermediate values are kept. What `layer` takes from outside its arguments can't be
    differentiated.

    Args:
      layer: function of one layer's whole parameters and of activations, a pytree whose shapes and types it keeps.
      shards: this device's part of the parameters: a list of pytrees, one a layer, or else one pytree of arrays [layers, ...].
        Stacked layers run in a `lax.scan`. All layers of a stack are alike; those of a list may differ.
      x: activations, the input of the first layer.
      axis_name: mesh axis, or tuple of axes, over which the parameters are sharded.
      axis: dimension along which they are sharded, counted without the dimension of layers: an integer, or a pytree of integers, one for
        each array of a layer.
      all_gather: a function like jax.lax.all_gather.
      halves: gather by hoccl_jax.all_gather_start before a layer and done after it, whatever `all_gather` is. On GPUs all arrays of a layer
        are then on their way during the layer before, where XLA lets at most two plain gathers run at a time. Needs jax.jit around it, as
        all futures do.

    Returns:
      The output of the last layer. Gradients of the shards are sums over `axis_name`, by jax.lax.psum_scatter, and sharded as the shards.

    Raises:
      ValueError: there are no layers, stacked arrays have different numbers of them, or an array has no dimension to be sharded along.
    """
    stacked = not isinstance(shards, list)
    for path, leaf in jax.tree.leaves_with_path(shards):
        if jnp.ndim(leaf) <= stacked:
            raise ValueError(
                f"shards{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, but needs a dimension to be sharded along"
                f"{' beside that of layers' if stacked else ''}"
            )
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(shards)} if stacked else {len(shards)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"shards must hold one or more layers, and stacked arrays the same number of them; got {sorted(counts)}")
    return _apply(layer, _Options(axis_name, axis, all_gather, halves), _Stack(shards) if stacked else shards, x)


@jax.tree_util.register_pytree_node_class
class _Stack:
    """Layers in arrays with a dimension of layers, with the few operations of a list that are needed here."""

    def __init__(self, arrays: Any):
        self.arrays = arrays

    def __len__(self) -> int:
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def __getitem__(self, index: int | slice) -> Any:
        part = jax.tree.map(lambda leaf: leaf[index], self.arrays)
        return _Stack(part) if isinstance(index, slice) else part

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.arrays,), None

    @classmethod
    def tree_unflatten(cls, _static: None, children: Any) -> _Stack:
        return cls(*children)


Layers = _Stack | list[Any]


def _loop(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, operands: Sequence[Layers], *, reverse: bool = False
) -> tuple[Any, Layers]:
    """`lax.scan` over stacks, a Python loop over lists. The results are a stack, or a list, in the order of the operands."""
    count = len(operands[0])
    stacks = [operand for operand in operands if isinstance(operand, _Stack)]
    if stacks:
        # Two layers in a round use two buffers for gathered parameters in turns; one would copy them from round to round.
        carry, results = lax.scan(body, carry, tuple(stack.arrays for stack in stacks), reverse=reverse, unroll=2)
        return carry, _Stack(results)
    results = [None] * count
    for index in reversed(range(count)) if reverse else range(count):
        carry, results[index] = body(carry, tuple(operand[index] for operand in operands))
    return carry, results


def _join(*parts: Any) -> Layers:
    """Single layers, then a stack or a list of more."""
    *single, rest = parts
    if not isinstance(rest, _Stack):
        return [*single, *rest]
    return _Stack(jax.tree.map(lambda *leaves: jnp.concatenate([*(leaf[None] for leaf in leaves[:-1]), leaves[-1]]), *single, rest.arrays))


def _gather(options: _Options, shard: Any, gather: Callable[..., Any] | None = None) -> Any:
    gather = gather or options.all_gather

    def leaf(axis: int, part: Any) -> Any:
        return jax.tree.map(lambda array: gather(array, options.axis_name, axis=axis, tiled=True), part)

    return jax.tree.map(leaf, options.axis, shard)


def _gather_beside(options: _Options, shard: Any, compute: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """The gathered parameters, and what is computed meanwhile."""
    if options.halves:
        return futures.overlap(_gather(options, shard, futures.all_gather_start), compute, *arguments)
    *others, last = arguments  # what comes last was computed last
    shard, last = prefetch_barrier(shard, last)
    return _gather(options, shard), compute(*others, last)


def _reduce(options: _Options, gradient: Any) -> Any:
    def leaf(axis: int, part: Any) -> Any:
        return jax.tree.map(lambda array: lax.psum_scatter(array, options.axis_name, scatter_dimension=axis, tiled=True), part)

    return jax.tree.map(leaf, options.axis, gradient)


def _forward(layer: Layer, options: _Options, shards: Layers, x: Any) -> tuple[Any, tuple[Layers, Any]]:
    """The output, and the inputs of all layers but the last, and that of the last."""

    def step(carry: tuple[Any, Any], operands: tuple[Any]) -> tuple[tuple[Any, Any], Any]:
        x, params = carry
        ahead, y = _gather_beside(options, operands[0], layer, params, x)
        return (y, ahead), x

    (x, params), inputs = _loop(step, (x, _gather(options, shards[0])), [shards[1:]])
    return layer(params, x), (inputs, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(layer: Layer, options: _Options, shards: Layers, x: Any) -> Any:
    return _forward(layer, options, shards, x)[0]


def _apply_forward(layer: Layer, options: _Options, shards: Layers, x: Any) -> tuple[Any, Any]:
    y, inputs = _forward(layer, options, shards, x)
    return y, (shards, *inputs)


def _apply_backward(layer: Layer, options: _Options, saved: Any, cotangent: Any) -> tuple[Layers, Any]:
    shards, inputs, last_input = saved
    cotangent = part(cotangent, like=last_input)

    def pull_back(params: Any, x: Any, cotangent: Any) -> tuple[Any, Any]:
        # Tied to the cotangent, or XLA would merge this computation of the layer with the forward pass's and keep that one's results.
        (params, x), cotangent = prefetch_barrier((params, x), cotangent)
        (params, fixed_params), (x, fixed_x) = split(params), split(x)
        return jax.vjp(lambda params, x: part(layer(merge(params, fixed_params), merge(x, fixed_x))), params, x)[1](cotangent)

    def step(carry: tuple[Any, Any, Any], operands: tuple[Any, Any]) -> tuple[tuple[Any, Any, Any], Any]:
        """The gradient of one layer, while the one before it is gathered and the gradients of the one after it are reduced."""
        cotangent, params, gradient_after = carry
        shard_before, x = operands
        reduced = _reduce(options, gradient_after)
        ahead, (gradient, cotangent) = _gather_beside(options, shard_before, pull_back, params, x, cotangent)
        # Or XLA would put off all reductions to the end, where nothing is left to run beside.
        reduced, cotangent = prefetch_barrier(reduced, cotangent)
        return (cotangent, ahead, gradient), reduced

    last = len(shards) - 1
    params = _gather(options, shards[last])
    if last == 0:
        gradient, cotangent = pull_back(params, last_input, cotangent)
        return _join(_reduce(options, gradient), part(shards[1:])), cotangent
    ahead, (gradient, cotangent) = _gather_beside(options, shards[last - 1], pull_back, params, last_input, cotangent)
    # Layers last - 1 to 1. Each also reduces the gradients of the layer after it, so the results are those of layers 2 to last.
    (cotangent, ahead, gradient), reduced = _loop(step, (cotangent, ahead, gradient), [shards[: last - 1], inputs[1:]], reverse=True)
    gradient_of_second = _reduce(options, gradient)
    gradient, cotangent = pull_back(ahead, inputs[0], cotangent)
    gradient_of_second, cotangent = prefetch_barrier(gradient_of_second, cotangent)
    return _join(_reduce(options, gradient), gradient_of_second, reduced), cotangent


_apply.defvjp(_apply_forward, _apply_backward)
