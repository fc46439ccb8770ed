"""`exchange`: any static pattern of flows between the ranks of an axis, in one operation."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import parallel
from jax.extend.core import Primitive

from hoccl_jax import primitives, runtime
from hoccl_jax.collectives import AxisName, Priority, checked_options
from hoccl_jax.config import Config


class Flow(NamedTuple):
    """`rows` rows from row `src_row` of x on rank `src` go to row `dst_row` of the result on rank `dst`. Rows lie along dimension 0."""

    src: int
    dst: int
    src_row: int
    dst_row: int
    rows: int


def exchange(
    x: Any,
    axis_name: AxisName,
    flows: Iterable[Flow | tuple[int, int, int, int, int]],
    *,
    rows: int | None = None,
    into: Any = None,
    priority: Priority = "foreground",
    overlap: bool | None = None,
) -> Any:
    """Moves rows of x between ranks as a table of flows says. For use inside jax.shard_map.

    Args:
      x: array of shape [n, ...].
      axis_name: mesh axis, or tuple of axes; ranks are indices into it (as of jax.lax.axis_index).
      flows: `Flow`s, or tuples (src, dst, src_row, dst_row, rows). The table is the same on all ranks. Rows may be sent any number of
        times, to the same rank too; no row of a result may be written twice.
      rows: of the result, whose shape is [rows, ...]; default n. Rows that no flow writes are 0.
      into: what the result is before the flows, of shape [rows, ...] and the type of x; instead of `rows`.
      priority, overlap: see hoccl_jax.collectives.

    On other platforms than CPU and CUDA it is made of jax.lax.all_gather, and counted in `hoccl_jax.stats()["fallbacks"]`.

    Its transpose is the exchange with the flows reversed, where rows that several flows have read get the sum of what comes back.

    Raises:
      ValueError: a flow is outside the ranks, x or the result, has no rows, or overlaps another one at its destination: the message names
        it; x has no dimensions; both `rows` and `into`, or an `into` of another shape or type.
    """
    options = checked_options(priority, overlap)
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("exchange: x needs a dimension 0 for its rows, got a scalar")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(into) if into is not None else None
        moved = exchange(jax.random.key_data(x), axis_name, flows, rows=rows, into=data, priority=priority, overlap=overlap)
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    x = parallel.insert_collective_pvary(names, x)
    if into is None:
        into = _zeros(x, x.shape[0] if rows is None else rows)
    elif rows is not None:
        raise ValueError("exchange: got both rows and into, which has rows of its own")
    into = jnp.asarray(into)
    if into.dtype != x.dtype or into.shape[1:] != x.shape[1:] or into.ndim == 0:
        raise ValueError(f"exchange: into must be of the type of x and agree with its shape after dimension 0, got {into} for {x}")
    varying = core.typeof(x).mat.varying | core.typeof(into).mat.varying
    x, into = (core.pvary(each, tuple(varying - core.typeof(each).mat.varying)) for each in (x, into))
    table = checked_flows(flows, lax.axis_size(names), x.shape[0], into.shape[0])
    if not table or x.size == 0:
        return into
    if Config.from_env().disable:
        return _by_lax(x, into, names, table)
    carrier = primitives.carrier(x.dtype)
    moved = exchange_p.bind(x.astype(carrier), into.astype(carrier), axis_name=names, flows=table, options=options)
    return moved.astype(x.dtype)


def checked_flows(flows: Iterable[Any], ranks: int, rows_in: int, rows_out: int) -> tuple[Flow, ...]:
    """The table, sorted by destination. Raises ValueError as `exchange` does."""
    table = []
    for index, given in enumerate(flows):
        try:
            flow = Flow(*map(operator.index, given))
        except (TypeError, ValueError) as error:
            raise ValueError(f"exchange: flow {index} must be (src, dst, src_row, dst_row, rows) in integers, got {given!r}") from error
        if not (0 <= flow.src < ranks and 0 <= flow.dst < ranks):
            raise ValueError(f"exchange: flow {index}, {flow}, names a rank outside 0 to {ranks - 1}")
        if flow.rows < 1:
            raise ValueError(f"exchange: flow {index}, {flow}, has no rows")
        if flow.src_row < 0 or flow.src_row + flow.rows > rows_in:
            raise ValueError(f"exchange: flow {index}, {flow}, reads outside the {rows_in} rows of x")
        if flow.dst_row < 0 or flow.dst_row + flow.rows > rows_out:
            raise ValueError(f"exchange: flow {index}, {flow}, writes outside the {rows_out} rows of the result")
        table.append(flow)
    table.sort(key=lambda flow: (flow.dst, flow.dst_row))
    for before, flow in itertools.pairwise(table):
        if before.dst == flow.dst and before.dst_row + before.rows > flow.dst_row:
            raise ValueError(f"exchange: {before} and {flow} write the same rows of rank {flow.dst}")
    return tuple(table)


def _zeros(x: Any, rows: int) -> Any:
    """Of the type of x, but for the number of rows."""
    zeros = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return core.pvary(zeros, tuple(core.typeof(x).mat.varying - core.typeof(zeros).mat.varying))


def _written(flows: Sequence[Flow], axis_name: tuple[Any, ...], like: Any) -> Any:
    """Which rows of this rank's result some flow writes, in a shape that broadcasts against `like`."""
    mask = np.zeros((lax.axis_size(axis_name), like.shape[0]), bool)
    for flow in flows:
        mask[flow.dst, flow.dst_row : flow.dst_row + flow.rows] = True
    own = jnp.asarray(mask)[lax.axis_index(axis_name)]
    return own.reshape(-1, *[1] * (like.ndim - 1))


def _by_lax(x: Any, into: Any, axis_name: tuple[Any, ...], flows: Sequence[Flow]) -> Any:
    """The same by an all_gather of jax.lax, for platforms without the engine."""
    everything, rank = lax.all_gather(x, axis_name), lax.axis_index(axis_name)
    for flow in flows:
        piece = lax.slice_in_dim(everything[flow.src], flow.src_row, flow.src_row + flow.rows)
        into = jnp.where(rank == flow.dst, lax.dynamic_update_slice_in_dim(into, piece, flow.dst_row, 0), into)
    return into


exchange_p = Primitive("hoccl_exchange")


@exchange_p.def_impl
def _impl(*_: Any, axis_name: tuple[Any, ...], **__: Any) -> Any:
    raise NameError(f"exchange: unbound axis name {axis_name}: use it inside jax.shard_map")


@exchange_p.def_effectful_abstract_eval
def _abstract_eval(x: Any, into: Any, *, axis_name: tuple[Any, ...], **_: Any) -> Any:
    parallel.collective_vma_rule("exchange", axis_name, x)
    core.standard_vma_rule("exchange", x, into)
    return into.update(weak_type=False), {*map(core.NamedAxisEffect, axis_name)}


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = exchange_p.bind(*primals, **params)
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return out, ad.Zero(core.typeof(out).to_tangent_aval())
    return out, exchange_p.bind(*map(ad.instantiate_zeros, tangents), **params)


def _transpose(cotangent: Any, x: Any, into: Any, *, axis_name: tuple[Any, ...], flows: tuple[Flow, ...], options: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(each.aval) if ad.is_undefined_primal(each) else None for each in (x, into)]
    back, before = None, None
    if ad.is_undefined_primal(x):
        back = sum(
            exchange_p.bind(cotangent, _zeros(cotangent, x.aval.shape[0]), axis_name=axis_name, flows=layer, options=options)
            for layer in _layers(flows)
        )
    if ad.is_undefined_primal(into):
        before = jnp.where(_written(flows, axis_name, cotangent), jnp.zeros_like(cotangent), cotangent)
    return [back, before]


def _layers(flows: Sequence[Flow]) -> list[tuple[Flow, ...]]:
    """The flows reversed, in as few tables as may be in which none writes what another one does."""
    layers: list[tuple[list[Flow], dict[int, int]]] = []  # flows, and by rank the first row after the last one that they write
    for flow in sorted(flows, key=lambda flow: (flow.src, flow.src_row)):
        reverse = Flow(flow.dst, flow.src, flow.dst_row, flow.src_row, flow.rows)
        free = [layer for layer in layers if layer[1][reverse.dst] <= reverse.dst_row]
        if not free:
            free = [([], defaultdict(int))]
            layers += free
        table, end = free[0]
        table.append(reverse)
        end[reverse.dst] = reverse.dst_row + reverse.rows
    return [tuple(table) for table, _ in layers]


def _batch(axis: Any, operands: Any, dims: Any, *, axis_name: tuple[Any, ...], flows: tuple[Flow, ...], options: Any) -> Any:
    if axis.name in axis_name:
        if axis_name != (axis.name,):
            raise NotImplementedError(f"exchange over a vmapped axis and others at once: {axis_name}")
        x, into = (batching.bdim_at_front(operand, dim, axis.size) for operand, dim in zip(operands, dims, strict=True))
        for flow in flows:
            piece = x[flow.src, flow.src_row : flow.src_row + flow.rows]
            into = into.at[flow.dst, flow.dst_row : flow.dst_row + flow.rows].set(piece)
        return into, 0
    # Behind the rows.
    x, into = (jnp.moveaxis(batching.bdim_at_front(operand, dim, axis.size), 0, 1) for operand, dim in zip(operands, dims, strict=True))
    return exchange_p.bind(x, into, axis_name=axis_name, flows=flows, options=options), 1


def call_attributes(ctx: Any, kind: str, groups: Any, x: Any, rows: int, **more: Any) -> dict[str, Any]:
    """The attributes of a custom call that replaces rows; `more` are those that depend on the kind."""
    return {
        "kind": kind,
        "module": primitives.module_name(ctx),
        "site": next(ctx.module_context.channel_iterator),
        "groups": primitives.device_ids(ctx.module_context.axis_context.mesh, groups).reshape(-1),
        "group_size": len(groups[0]),
        "dtype": str(x.dtype),
        "itemsize": x.dtype.itemsize,
        "shape": np.array(x.shape, np.int64),
        "split_axis": -1,
        "concat_axis": -1,
        "pairs": np.array([], np.int64),
        "result_rows": rows,
        "slices": 1,
        "blocks": np.array([], np.int64),
        **more,
    }


def lower_call(platform: str, ctx: Any, operands: Sequence[Any], attributes: dict[str, Any], options: primitives.Options) -> Any:
    """Emits the custom call; its result starts as operand 1, which the program's own stream can have in the same buffer.

    On a stream beside it the engine copies operand 1: XLA puts no copies into what other streams run, and would let two calls, or a call
    and what reads operand 1 later, share a buffer that one of them overwrites.
    """
    beside = platform == "cuda" and options.overlap

    def call(*operands: Any) -> Any:
        lowering = jax.ffi.ffi_lowering(primitives.TARGET, operand_output_aliases={} if beside else {1: 0})
        return lowering(ctx, *operands, **attributes, beside=int(beside))[0]

    return [primitives.beside(ctx, operands, primitives.STREAMS[options.priority], call) if beside else call(*operands)]


def _lower(
    platform: str, ctx: Any, x: Any, into: Any, *, axis_name: tuple[Any, ...], flows: tuple[Flow, ...], options: primitives.Options
) -> Any:
    runtime.register_targets()
    groups = parallel._replica_groups(ctx.module_context.axis_context, axis_name, None)
    attributes = call_attributes(
        ctx,
        "exchange",
        groups,
        ctx.avals_in[0],
        ctx.avals_in[1].shape[0],
        blocks=np.array(flows, np.int64).reshape(-1),
        priority=primitives.PRIORITIES[options.priority],
    )
    return lower_call(platform, ctx, (x, into), attributes, options)


def _lower_by_lax(ctx: Any, x: Any, into: Any, *, axis_name: tuple[Any, ...], flows: tuple[Flow, ...], options: Any) -> Any:
    runtime.count_fallback("exchange", "not on this platform yet")
    return mlir.lower_fun(partial(_by_lax, axis_name=axis_name, flows=flows), multiple_results=False)(ctx, x, into)


ad.primitive_jvps[exchange_p] = _jvp
ad.primitive_transposes[exchange_p] = _transpose
batching.fancy_primitive_batchers[exchange_p] = _batch
mlir.register_lowering(exchange_p, _lower_by_lax, cacheable=False)
for _platform in primitives.PLATFORMS:
    mlir.register_lowering(exchange_p, partial(_lower, _platform), platform=_platform, cacheable=False)
