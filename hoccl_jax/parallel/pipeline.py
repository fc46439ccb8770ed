"""Pipeline parallelism: each device along a mesh axis holds a stage, and microbatches pass through the stages one behind the other.

    y = pipeline.apply(stage, params, microbatches, axis_name="stage")                 # GPipe, differentiated by JAX
    loss = pipeline.loss(enter, stage, leave, params, microbatches, axis_name="stage")  # 1F1B, or GPipe

All devices run one program in ticks. In a tick a stage works on at most one microbatch in each direction, and what it computed goes to
its neighbours by ppermute. Work that a stage doesn't have in a tick, while the pipeline fills and drains, is skipped, not masked.

**GPipe**: all microbatches forward, then, as JAX differentiates the loop, all backward. Keeps activations of all microbatches.
M microbatches over S stages take M + S - 1 ticks; with `overlap`, where a transfer runs during the next tick's computation,
M + 2 (S - 1).

**1F1B**: a microbatch goes backward as soon as it has come through the last stage. A stage keeps the inputs of at most 2 S - 1
microbatches, whatever their number, and computes a stage again in the backward pass. Each transfer runs beside computation:
activations beside the backward computation of their tick, cotangents beside the forward computation of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core

from hoccl_jax import collectives, futures
from hoccl_jax.parallel.differentiable import merge, part, split

Stage = Callable[[Any, Any], Any]  # (parameters, activations) -> activations
Permute = Callable[[Any, Any, Any], Any]  # as jax.lax.ppermute


def apply(stage: Stage, params: Any, microbatches: Any, *, axis_name: Any, overlap: bool = False, ppermute: Permute | None = None) -> Any:
    """Passes microbatches through all stages, by the GPipe schedule.

    Args:
      stage: function of this stage's parameters and activations, a pytree of arrays whose shapes and types it keeps. No collective over
        `axis_name` in it; others are fine where all devices of their groups are of one stage.
      params: this stage's parameters.
      microbatches: activations [microbatches, ...], which the first stage takes; those of other stages count nowhere.
      axis_name: mesh axis along which the stages lie, in order.
      overlap: let a transfer have a tick of its own, so that it runs during the computation of the next tick. Pays with many microbatches
        and long transfers: it costs S - 1 ticks more, each shorter by a transfer.
      ppermute: a function like jax.lax.ppermute to move data with. Default: hoccl_jax.ppermute, in two halves where that overlaps.

    Returns:
      What the last stage has computed, [microbatches, ...]; zeros on other stages.

    Raises:
      ValueError: `stage` returns other shapes or types than it takes.
    """
    ring = _Ring.of(axis_name, params, microbatches, ppermute)
    params, microbatches = ring.varying((params, microbatches))
    count = _count(microbatches)
    _check_stage(stage, params, jax.tree.map(lambda leaf: leaf[0], microbatches))
    hop = 2 if overlap else 1
    nothing = jax.tree.map(lambda leaf: ring.zeros(core.typeof(leaf[0])), microbatches)

    def tick(carry: tuple[Any, Any], time: jax.Array) -> tuple[tuple[Any, Any], Any]:
        received, leaving = carry
        number = time - hop * ring.stage
        works = (number >= 0) & (number < count)

        def compute(params: Any, received: Any) -> Any:
            return ring.where(works, lambda: stage(params, ring.choose(ring.first, _at(microbatches, number), received)), nothing)

        if overlap:
            arriving, y = ring.beside(leaving, +1, compute, params, received)
            return (arriving, y), y
        y = compute(params, received)
        return (ring.permute(y, +1), leaving), y

    _, results = lax.scan(tick, (nothing, nothing), jnp.arange(count + hop * (ring.size - 1)))
    results = jax.tree.map(lambda leaf: leaf[hop * (ring.size - 1) :], results)
    return jax.tree.map(lambda leaf: jnp.where(ring.last, leaf, jnp.zeros_like(leaf)), results)


def _described(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: core.ShapedArray(leaf.shape, leaf.dtype).str_short(), tree))


def _check_stage(stage: Stage, params: Any, activations: Any) -> None:
    taken, returned = _described(activations), _described(jax.eval_shape(stage, params, activations))
    if taken != returned:
        raise ValueError(f"stage must keep the shapes and types of activations; it takes {taken} and returns {returned}")


def loss(
    enter: Callable[[Any, Any], Any],
    stage: Stage,
    leave: Callable[[Any, Any, Any], jax.Array],
    params: Any,
    microbatches: Any,
    *,
    axis_name: Any,
    schedule: Literal["1f1b", "gpipe"] = "1f1b",
    ppermute: Permute | None = None,
) -> jax.Array:
    """This device's contribution to the loss of a pipeline: its sum over `axis_name` is the sum over microbatches.

    Differentiable in the floating-point arrays of `params` and `microbatches`. The functions may hold no collective over `axis_name`;
    others are fine where all devices of their groups are of one stage. What they take from outside their arguments can't be
    differentiated: pass it in `params`. (With "1f1b" JAX says so, as a leaked tracer. With "gpipe" the gradient of a value that is the
    same on all stages would be a sum over `axis_name` that only some stages come to, and waits for ever.) With "1f1b", under jax.grad,
    the loss and its gradients are computed together, in the forward pass.

    Args:
      enter: (params, microbatch) -> activations, a pytree of arrays. Computed by the first stage.
      stage: (params, activations) -> activations of the same shapes and types. Computed by each stage.
      leave: (params, activations, microbatch) -> loss of the microbatch, a scalar. Computed by the last stage.
      params: this stage's parameters, with those of `enter` and `leave`.
      microbatches: pytree of arrays [microbatches, ...], the same on all stages.
      axis_name: mesh axis along which the stages lie, in order.
      schedule: see the module's text.
      ppermute: a function like jax.lax.ppermute to move data with. Default: hoccl_jax.ppermute, in two halves where that overlaps.

    Returns:
      On the last stage the sum of the losses of all microbatches, zero on others.

    Raises:
      ValueError: `stage` returns other shapes or types than it takes, or `leave` no floating-point scalar.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"schedule must be 1f1b or gpipe, got {schedule!r}")
    ring = _Ring.of(axis_name, params, microbatches, ppermute)
    functions = _Functions(enter, stage, leave)
    # From here on all values vary over the same axes, so the sums of gradients that this brings about stand outside of the loop.
    params, microbatches = ring.varying((params, microbatches))
    _count(microbatches)
    microbatch = jax.tree.map(lambda leaf: leaf[0], microbatches)
    activations = jax.eval_shape(enter, params, microbatch)
    _check_stage(stage, params, activations)
    value = jax.eval_shape(leave, params, activations, microbatch)
    if not (isinstance(value, jax.ShapeDtypeStruct) and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)):
        raise ValueError(f"leave must return a floating-point scalar, the loss of a microbatch; it returns {_described(value)}")
    if schedule == "gpipe":
        return _gpipe(functions, ring, params, microbatches)

    @jax.custom_vjp
    def total(one: Any, other: Any) -> jax.Array:
        return _gpipe(functions, ring, *merge(one, other))  # nothing to go backward for

    def forward(one: Any, other: Any) -> tuple[jax.Array, Any]:
        return _one_f_one_b(functions, ring, *merge(one, other))

    def backward(gradients: Any, cotangent: jax.Array) -> Any:
        return jax.tree.map(lambda gradient: (gradient * cotangent).astype(gradient.dtype), gradients), None

    total.defvjp(forward, backward)
    return total(*split((params, microbatches)))


class _Functions(NamedTuple):
    enter: Callable[[Any, Any], Any]
    stage: Stage
    leave: Callable[[Any, Any, Any], jax.Array]


class _Ring(NamedTuple):
    """The stages as one of them sees them."""

    axis_name: Any
    size: int
    axes: tuple[Any, ...]  # over which all values are to vary, under check_vma
    ppermute: Permute | None

    @classmethod
    def of(cls, axis_name: Any, params: Any, microbatches: Any, ppermute: Permute | None) -> _Ring:
        values = [lax.axis_index(axis_name), *jax.tree.leaves((params, microbatches))]
        axes = frozenset[Any]().union(*(core.typeof(value).mat.varying for value in values))
        return cls(axis_name, lax.axis_size(axis_name), tuple(sorted(axes, key=str)), ppermute)

    @property
    def stage(self) -> jax.Array:
        return lax.axis_index(self.axis_name)  # each time anew: rules of differentiation may hold no traced value of their surroundings

    @property
    def first(self) -> jax.Array:
        return self.stage == 0

    @property
    def last(self) -> jax.Array:
        return self.stage == self.size - 1

    def varying(self, tree: Any) -> Any:
        def leaf(value: jax.Array) -> jax.Array:
            missing = tuple(axis for axis in self.axes if axis not in core.typeof(value).mat.varying)
            return lax.pcast(value, missing, to="varying") if missing else value

        return jax.tree.map(leaf, tree)

    def zeros(self, aval: Any) -> jax.Array:
        return self.varying(jnp.zeros(aval.shape, aval.dtype))

    def where(self, condition: jax.Array, compute: Callable[[], Any], otherwise: Any) -> Any:
        """`compute()` where the condition holds. Elsewhere it does not run."""
        return lax.cond(self.varying(condition), lambda: self.varying(compute()), lambda: self.varying(otherwise))

    def choose(self, condition: jax.Array, one: Any, other: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)

    def _pairs(self, step: int) -> list[tuple[int, int]]:
        return [(source, source + step) for source in range(self.size) if 0 <= source + step < self.size]

    def permute(self, tree: Any, step: int) -> Any:
        """Sends to the next stage (step 1) or the previous one (-1); the end of the pipeline gets zeros."""
        move = self.ppermute or collectives.ppermute
        return move(tree, self.axis_name, self._pairs(step))

    def beside(self, tree: Any, step: int, compute: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
        """The same during a computation; returns both results."""
        if self.ppermute is not None:
            return self.permute(tree, step), compute(*arguments)
        return futures.overlap(futures.ppermute_start(tree, self.axis_name, self._pairs(step)), compute, *arguments)


def _count(microbatches: Any) -> int:
    counts = {leaf.shape[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(microbatches)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"microbatches must be arrays [microbatches, ...] with one and the same number of them, got {sorted(counts)}")
    return counts.pop()


def _at(tree: Any, index: jax.Array) -> Any:
    """Element `index` along the first dimension, or the nearest there is."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, jnp.clip(index, 0, leaf.shape[0] - 1), keepdims=False), tree)


def _activation_types(functions: _Functions, params: Any, microbatches: Any) -> Any:
    return jax.eval_shape(functions.enter, params, jax.tree.map(lambda leaf: leaf[0], microbatches))


def _gpipe(functions: _Functions, ring: _Ring, params: Any, microbatches: Any) -> jax.Array:
    count = _count(microbatches)
    nothing = jax.tree.map(ring.zeros, _activation_types(functions, params, microbatches))

    def tick(carry: tuple[Any, jax.Array], time: jax.Array) -> tuple[tuple[Any, jax.Array], None]:
        received, total = carry
        number = time - ring.stage
        works = (number >= 0) & (number < count)
        microbatch = _at(microbatches, number)

        def compute() -> tuple[Any, jax.Array]:
            x = ring.where(ring.first, lambda: functions.enter(params, microbatch), received)
            y = functions.stage(params, x)
            value = ring.where(ring.last, lambda: functions.leave(params, y, microbatch), zero)
            return y, value

        zero = jnp.zeros_like(total)
        y, value = ring.where(works, compute, (nothing, zero))
        return (ring.permute(y, +1), total + value), None

    zero = ring.zeros(jax.eval_shape(functions.leave, params, nothing, _at(microbatches, jnp.array(0))))
    (_, total), _ = lax.scan(tick, (nothing, zero), jnp.arange(count + ring.size - 1))
    return total


def _one_f_one_b(functions: _Functions, ring: _Ring, params: Any, microbatches: Any) -> tuple[jax.Array, tuple[Any, Any]]:
    """The loss, and its gradients by what of `params` and `microbatches` has any.

    At time t, stage s computes microbatch t - s forward, and t - (2 (S - 1) - s) backward. The last stage meets a microbatch in both
    directions in the same tick, so it leaves the forward computation to the backward one.
    """
    floats, rest = split(microbatches)
    count = _count(microbatches)
    slots = min(count, 2 * ring.size - 1)
    nothing = jax.tree.map(ring.zeros, _activation_types(functions, params, microbatches))
    zero = ring.zeros(jax.eval_shape(functions.leave, params, nothing, _at(microbatches, jnp.array(0))))
    none = jax.tree.map(jnp.zeros_like, part(params)), part(nothing), jax.tree.map(jnp.zeros_like, _at(floats, jnp.array(0)))

    def backward(params: Any, x: Any, received: Any, number: jax.Array) -> tuple[jax.Array, Any, Any, Any]:
        """(loss, gradients of the parameters, of the stage's input, of the microbatch)."""
        own, fixed_own = _at(floats, number), _at(rest, number)
        (params, fixed_params), (x, fixed_x) = split(params), split(x)
        y, pull_stage, fixed_y = jax.vjp(
            lambda params, x: split(ring.varying(functions.stage(merge(params, fixed_params), merge(x, fixed_x)))), params, x, has_aux=True
        )

        def leave() -> tuple[jax.Array, Any, Any, Any]:
            def value_of(params: Any, y: Any, own: Any) -> jax.Array:
                return functions.leave(merge(params, fixed_params), merge(y, fixed_y), merge(own, fixed_own))

            value, pull = jax.vjp(value_of, params, y, own)
            return value, *pull(jnp.ones_like(value))

        value, by_params, cotangent, by_floats = ring.where(ring.last, leave, (zero, none[0], received, none[2]))
        of_stage, cotangent = pull_stage(cotangent)

        def enter() -> tuple[Any, Any]:
            def entering(params: Any, own: Any) -> Any:
                return part(ring.varying(functions.enter(merge(params, fixed_params), merge(own, fixed_own))))

            return jax.vjp(entering, params, own)[1](cotangent)

        entered = ring.where(ring.first, enter, (none[0], none[2]))
        by_params = jax.tree.map(lambda *parts: parts[0] + parts[1] + parts[2], by_params, of_stage, entered[0])
        return value, by_params, cotangent, jax.tree.map(jnp.add, by_floats, entered[1])

    def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
        received, leaving, saved, total, by_params, by_floats = carry
        ahead = time - ring.stage
        back = time - (2 * (ring.size - 1) - ring.stage)

        # Forward, while the cotangents of the last tick are on their way.
        def enters(params: Any, received: Any) -> Any:
            return ring.where(ring.first, lambda: functions.enter(params, _at(microbatches, ahead)), received)

        def forward(params: Any, received: Any) -> tuple[Any, Any]:
            x = ring.where((ahead >= 0) & (ahead < count), partial(enters, params, received), nothing)
            works = (ahead >= 0) & (ahead < count) & ~ring.last
            return x, ring.where(works, lambda: functions.stage(params, x), nothing)

        cotangent, (x, y) = ring.beside(leaving, -1, forward, params, received)
        slot = jnp.where((ahead >= 0) & (ahead < count), ahead % slots, slots)  # the last slot is for nothing
        saved = jax.tree.map(lambda kept, new: lax.dynamic_update_index_in_dim(kept, new, slot, 0), saved, x)

        # Backward, while the activations are on their way.
        works = (back >= 0) & (back < count)
        kept = _at(saved, jnp.where(works, back % slots, slots))

        def turn(params: Any, kept: Any, cotangent: Any) -> Any:
            return ring.where(works, lambda: backward(params, kept, cotangent, back), (zero, *none))

        received, (value, of_params, leaving, of_floats) = ring.beside(y, +1, turn, params, kept, cotangent)
        by_params = jax.tree.map(jnp.add, by_params, of_params)
        place = jnp.clip(back, 0, count - 1)
        by_floats = jax.tree.map(
            lambda sums, new: lax.dynamic_update_index_in_dim(sums, _at(sums, place) + new, place, 0), by_floats, of_floats
        )
        return (received, leaving, saved, total + value, by_params, by_floats), None

    saved = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (slots + 1, *leaf.shape)), nothing)
    start = (nothing, none[1], saved, zero, none[0], jax.tree.map(jnp.zeros_like, floats))
    (_, _, _, total, by_params, by_floats), _ = lax.scan(tick, ring.varying(start), jnp.arange(count + 2 * (ring.size - 1)))
    return total, (by_params, by_floats)
