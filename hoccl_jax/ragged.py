"""`ragged_all_to_all`: slices whose sizes are known only when the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import parallel
from jax.extend.core import Primitive

from hoccl_jax import collectives, primitives, runtime
from hoccl_jax.collectives import AxisName, Priority, checked_options
from hoccl_jax.exchange import call_attributes, lower_call
from hoccl_jax.primitives import Groups


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    priority: Priority = "foreground",
    overlap: bool | None = None,
) -> Any:
    """All-to-all of slices along dimension 0, with offsets and sizes in arrays; as jax.lax.ragged_all_to_all, with errors in place of the
    corruption that wrong offsets would be.

    Args:
      operand: array of shape [n, ...]; its rows are sent.
      output: array of shape [m, ...]: what the result is before what is received.
      input_offsets: integers of shape [k]: first row of each slice in operand. k is a multiple of the ranks; k / ranks slices go to each,
        rank after rank.
      send_sizes: integers of shape [k]: rows of each slice.
      output_offsets: integers of shape [k]: first row of each slice in the *receiver's* output.
      recv_sizes: integers of shape [k]: rows of each slice that this rank receives, sender after sender.
      axis_name: mesh axis, or tuple of axes.
      axis_index_groups: as for `all_gather`.
      priority, overlap: see hoccl_jax.collectives.

    On other platforms than CPU and CUDA it is jax.lax.ragged_all_to_all, counted in `hoccl_jax.stats()["fallbacks"]`. (That function itself
    lacks CPU devices.)

    Raises, when it runs, jax.errors.JaxRuntimeError on all ranks of the group, before anything moves, if on any of them a slice is outside
    its operand or output, a size is negative, sender and receiver have different sizes, or two slices overlap at their receiver; on GPUs
    the next operation raises it, or `hoccl_jax.check_errors`. Where a slice of no rows would lie does not matter. The gradient goes back by
    the same operation, so for it slices must not overlap in operand.
    """
    options = checked_options(priority, overlap)
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    varying = frozenset().union(*(core.typeof(x).mat.varying for x in (operand, output))) | set(names)
    numbers = (input_offsets, send_sizes, output_offsets, recv_sizes)

    def call(*args: Any) -> Any:
        cast = [core.pvary(x, tuple(varying - core.typeof(x).mat.varying)) for x in map(jnp.asarray, args)]
        return parallel.ragged_all_to_all(*cast, axis_name=names, axis_index_groups=axis_index_groups)

    return collectives._run(call, options.priority, options.overlap, operand, output, *numbers)


TWIN = parallel.ragged_all_to_all_p
ragged_p = Primitive("hoccl_ragged_all_to_all")
ragged_p.def_impl(lambda *args, options, **params: TWIN.impl(*args, **params))
ragged_p.def_effectful_abstract_eval(lambda *avals, options, **params: TWIN.abstract_eval(*avals, **params))


def _jvp(primals: Any, tangents: Any, *, options: primitives.Options, **params: Any) -> Any:
    return primitives.redirected(ad.primitive_jvps[TWIN], options, primals, tangents, **params)


def _batch(axis: Any, operands: Any, dims: Any, *, options: primitives.Options, **params: Any) -> Any:
    # jax.lax's rule takes numbers only if they are batched.
    operands = [batching.bdim_at_front(operand, dim, axis.size) for operand, dim in zip(operands, dims, strict=True)]
    return primitives.redirected(batching.fancy_primitive_batchers[TWIN], options, axis, operands, [0] * len(operands), **params)


def _transpose(cotangent: Any, operand: Any, output: Any, *numbers: Any, options: primitives.Options, **params: Any) -> Any:
    """That of jax.lax takes rows for replaced where a slice has none."""
    if type(cotangent) is ad.Zero:
        return [*(ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (operand, output)), *[None] * 4]
    input_offsets, send_sizes, output_offsets, recv_sizes = numbers
    axis_name, groups = params["axis_name"], params["axis_index_groups"]
    theirs = partial(collectives.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)
    received_at = theirs(output_offsets)
    operand_bar, output_bar = None, None
    if ad.is_undefined_primal(operand):
        sizes = (received_at, recv_sizes, theirs(input_offsets), send_sizes)
        zeros = jnp.zeros_like(cotangent, shape=operand.aval.shape)
        zeros = core.pvary(zeros, tuple(core.typeof(cotangent).mat.varying - core.typeof(zeros).mat.varying))
        operand_bar = ragged_p.bind(cotangent, zeros, *sizes, options=options, **params)
    if ad.is_undefined_primal(output):
        rows = cotangent.shape[0]
        first = jnp.where(recv_sizes > 0, received_at, rows)
        steps = jnp.zeros(rows, recv_sizes.dtype)
        steps = core.pvary(steps, tuple(core.typeof(first).mat.varying - core.typeof(steps).mat.varying))
        steps = steps.at[first].add(1, mode="drop").at[first + recv_sizes].add(-1, mode="drop")
        replaced = jnp.cumsum(steps).reshape(-1, *[1] * (cotangent.ndim - 1)) > 0
        output_bar = jnp.where(replaced, jnp.zeros_like(cotangent), cotangent)
    return [operand_bar, output_bar, *[None] * 4]


# What the custom call takes: every rank has the numbers of all of them, so each knows all flows, and finds the same errors, by itself.
rows_p = Primitive("hoccl_ragged_rows")
rows_p.def_abstract_eval(lambda operand, output, table, **_: output)


def _with_table(platform: str, operand: Any, output: Any, *numbers: Any, options: primitives.Options, **params: Any) -> Any:
    axis_name, groups = params["axis_name"], params["axis_index_groups"]
    wide = jnp.int64 if any(x.dtype in (jnp.int64, jnp.uint64) for x in numbers) else jnp.int32
    own = jnp.stack([x.astype(wide) for x in numbers])
    table = collectives.all_gather(own, axis_name, axis_index_groups=groups)
    carrier = primitives.carrier(operand.dtype)
    operand_rows, output_rows = operand.astype(carrier), output.astype(carrier)
    if platform == "cuda":
        output_rows = _with_own_rows(operand_rows, output_rows, own, _rank(axis_name, groups), table.shape[0])
    moved = rows_p.bind(operand_rows, output_rows, table, options=options, **params)
    return moved.astype(operand.dtype)


def _rank(axis_name: Any, groups: Groups | None) -> Any:
    """Of this device in its group."""
    index = lax.axis_index(axis_name)
    if groups is None:
        return index
    rank_of = {index: rank for group in groups for rank, index in enumerate(group)}
    return jnp.array([rank_of[index] for index in range(len(rank_of))])[index]


def _with_own_rows(operand: Any, output: Any, numbers: Any, rank: Any, ranks: int) -> Any:
    """The output with the slices that a rank sends to itself. Copies within a GPU are kernels, and one whose size the engine learns late
    could stand behind the very wait that its program is in; so XLA makes them. Wrong offsets do no harm: the engine checks them."""
    slices = numbers.shape[1] // ranks
    first, size, to, _ = lax.dynamic_slice_in_dim(numbers, rank * slices, slices, axis=1)
    row = jnp.arange(output.shape[0], dtype=numbers.dtype)[:, None]
    inside = (row >= to) & (row - to < size)
    source = jnp.sum(jnp.where(inside, row - to + first, 0), axis=1)
    taken = jnp.take(operand, source, axis=0, mode="clip")
    return jnp.where(jnp.any(inside, axis=1).reshape(-1, *[1] * (output.ndim - 1)), taken, output)


def lower(platform: str, ctx: Any, *operands: Any, options: primitives.Options, **params: Any) -> Any:
    operand, output, first = ctx.avals_in[:3]
    groups = parallel._replica_groups(ctx.module_context.axis_context, params["axis_name"], params["axis_index_groups"])
    if any(len(group) != len(groups[0]) for group in groups):
        raise ValueError(f"ragged_all_to_all: groups must be of one size, got {[len(group) for group in groups]}")
    if any(aval.shape != first.shape for aval in ctx.avals_in[2:]) or first.shape[0] % len(groups[0]) != 0:
        shapes = [aval.shape for aval in ctx.avals_in[2:]]
        raise ValueError(f"ragged_all_to_all: offsets and sizes must have one shape that {len(groups[0])} ranks divide, got {shapes}")
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:] or operand.ndim == 0:
        raise ValueError(f"ragged_all_to_all: operand and output must agree but for dimension 0, got {operand} and {output}")
    if output.size == 0 or operand.size == 0:
        return [operands[1]]
    return mlir.lower_fun(partial(_with_table, platform, options=options, **params), multiple_results=False)(ctx, *operands)


def _lower_rows(platform: str, ctx: Any, *operands: Any, options: primitives.Options, axis_name: Any, axis_index_groups: Any) -> Any:
    runtime.register_targets()
    operand, output, table = ctx.avals_in
    groups = parallel._replica_groups(ctx.module_context.axis_context, axis_name, axis_index_groups)
    attributes = call_attributes(
        ctx,
        "ragged_all_to_all",
        groups,
        operand,
        output.shape[0],
        slices=table.shape[2] // len(groups[0]),
        priority=primitives.PRIORITIES[options.priority],
    )
    return lower_call(platform, ctx, operands, attributes, options)


def _lower_twin(ctx: Any, *operands: Any, options: primitives.Options, **params: Any) -> Any:
    runtime.count_fallback("ragged_all_to_all", "not on this platform yet")
    return mlir.lower_fun(partial(TWIN.bind, **params), multiple_results=False)(ctx, *operands)


primitives.PRIMITIVES[TWIN] = ragged_p
ad.primitive_jvps[ragged_p] = _jvp
ad.primitive_transposes[ragged_p] = _transpose
batching.fancy_primitive_batchers[ragged_p] = _batch
mlir.register_lowering(ragged_p, _lower_twin, cacheable=False)
for _platform in primitives.PLATFORMS:
    mlir.register_lowering(ragged_p, partial(lower, _platform), platform=_platform, cacheable=False)
    mlir.register_lowering(rows_p, partial(_lower_rows, _platform), platform=_platform, cacheable=False)
