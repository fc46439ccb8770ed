"""A collective in two primitives: `start` begins the transfer, `done` awaits it, and computation comes between.

`start(x)` gives (x, buffer): the operand as it was, and where the result is being written. `done(x, buffer)` gives the result, in that same
buffer. The engine uses both until done, so nothing may copy or reuse them; `done` takes both to keep them alive. The lowering of done
checks that they come straight from a start, the handlers check that they have not moved.

Both are linear, and transposition turns one into the other: the transpose of done starts the transposed transfer of the cotangent, that
of start awaits it. The cotangent of `buffer` is then the operand of that transfer, and the cotangent of `x` the buffer that it fills,
which have the right shapes. Whatever ordered computation between start and done does so in the backward pass. Gathers and broadcasts
are transposed into reductions, which are jax.lax's and have no halves: there the transpose of start does it all.

In **staged** form the engine has buffers of its own, and `staged_start(x)` gives a handle, two numbers that may be copied and carried
through loops; `staged_done(handle)` gives the result. The handle is of floating point so that it has a cotangent: the handle of the
transposed transfer. A cotangent of zeros, where nothing contributes, is no transfer.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import parallel
from jax._src.lib.mlir import ir
from jax.extend.core import Primitive
from jax.ffi import ffi_lowering

from hoccl_jax import primitives
from hoccl_jax.primitives import Collective, Options, Params

START_TARGET = "hoccl_start"
DONE_TARGET = "hoccl_done"


STAGED_START_TARGET = "hoccl_staged_start"
STAGED_DONE_TARGET = "hoccl_staged_done"


@dataclasses.dataclass(frozen=True)
class Halves:
    start: Primitive
    done: Primitive
    staged_start: Primitive
    staged_done: Primitive


HALVES: dict[Primitive, Halves] = {}
"""By the twin of the collective."""


def _define(collective: Collective) -> Halves:
    twin = collective.twin
    names = [f"hoccl_{twin.name}_{half}" for half in ("start", "done", "staged_start", "staged_done")]
    halves = Halves(*map(Primitive, names))
    start, done = halves.start, halves.done
    start.multiple_results = True

    def start_types(operand: Any, *, options: Options, **params: Any) -> Any:
        result, effects = twin.abstract_eval(operand, **params)
        return [operand, result], effects

    start.def_effectful_abstract_eval(start_types)
    done.def_abstract_eval(lambda operand, buffer, **params: buffer)
    ad.deflinear2(start, partial(_transpose_start, collective))
    ad.deflinear2(done, partial(_transpose_done, collective))
    batching.fancy_primitive_batchers[start] = partial(_batch_start, collective)
    batching.fancy_primitive_batchers[done] = partial(_batch_done, collective)
    for platform in primitives.PLATFORMS:
        mlir.register_lowering(start, partial(_lower_start, collective), platform=platform, cacheable=False)
        mlir.register_lowering(done, partial(_lower_done, collective), platform=platform, cacheable=False)
    # Elsewhere the start is the whole collective.
    whole = mlir.lower_fun(lambda operand, *, options, **params: [operand, twin.bind(operand, **params)], multiple_results=True)
    mlir.register_lowering(start, whole, cacheable=False)
    mlir.register_lowering(done, lambda ctx, operand, buffer, **params: [buffer])
    _define_staged(collective, halves.staged_start, halves.staged_done)
    return halves


def _define_staged(collective: Collective, start: Primitive, done: Primitive) -> None:
    """The handle tells nothing of the result, so done has its `shape` and `dtype` as parameters."""

    def start_type(operand: Any, *, options: Options, **params: Any) -> Any:
        result, effects = collective.twin.abstract_eval(operand, **params)
        return result.update(shape=(2,), dtype=np.dtype(np.float32), weak_type=False), effects

    start.def_effectful_abstract_eval(start_type)
    done.def_abstract_eval(lambda handle, *, shape, dtype, **params: handle.update(shape=shape, dtype=dtype))
    ad.deflinear2(start, partial(_transpose_staged_start, collective))
    ad.deflinear2(done, partial(_transpose_staged_done, collective))
    batching.fancy_primitive_batchers[start] = partial(_batch_staged_start, collective)
    batching.fancy_primitive_batchers[done] = partial(_batch_staged_done, collective)
    mlir.register_lowering(start, partial(_lower_staged_start, collective), platform="cpu", cacheable=False)
    mlir.register_lowering(done, partial(_lower_staged_done, collective), platform="cpu", cacheable=False)


def _transposed(collective: Collective, params: Params) -> Params | None:
    """The parameters of the collective of the same kind that is the transpose; None where it is a reduction."""
    if collective.twin is parallel.ppermute_p:
        return params | {"perm": tuple((dst, src) for src, dst in params["perm"])}
    if collective.twin is parallel.all_to_all_p:
        return params | {"split_axis": params["concat_axis"], "concat_axis": params["split_axis"]}
    return None


def _transpose_done(collective: Collective, cotangent: Any, operand: Any, buffer: Any, **params: Any) -> Any:
    transposed = _transposed(collective, params)
    if transposed is None:
        return [ad.Zero(operand.aval), cotangent]
    cotangent, in_flight = HALVES[collective.twin].start.bind(cotangent, **transposed)
    return [in_flight, cotangent]


def _transpose_start(collective: Collective, cotangents: Any, operand: Any, **params: Any) -> Any:
    in_flight, cotangent = cotangents
    if type(cotangent) is ad.Zero:
        return [ad.Zero(operand.aval)]
    transposed = _transposed(collective, params)
    if transposed is None:
        return primitives.transpose(collective, cotangent, operand, **params)
    return [HALVES[collective.twin].done.bind(cotangent, in_flight, **transposed)]


# The batched dimension comes first in operand and buffer.


def _batched(collective: Collective, axis: Any, params: Params) -> Params:
    names = params["axis_name"] if isinstance(params["axis_name"], list | tuple) else (params["axis_name"],)
    if axis.name in names:
        raise NotImplementedError(f"{collective.kind}_start over the vmapped axis {axis.name!r}: use {collective.kind}")
    axes = ("all_gather_dimension", "split_axis", "concat_axis")
    return params | {name: params[name] + 1 for name in axes if name in params}


def _batch_start(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    (operand,), (dim,) = operands, dims
    return HALVES[collective.twin].start.bind(jnp.moveaxis(operand, dim, 0), **_batched(collective, axis, params)), (0, 0)


def _batch_done(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    if tuple(dims) != (0, 0):
        raise ValueError(f"done() of {collective.kind}: its future was rebuilt under vmap; call done() of what the start returned")
    return HALVES[collective.twin].done.bind(*operands, **_batched(collective, axis, params)), 0


# Lowering. Both calls have side effects: two starts of the same data are two, and a start stays where it is.


def _lower_start(collective: Collective, ctx: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    given, wanted = ctx.avals_out
    attributes = primitives.call_attributes(collective, ctx, given, wanted, options, params)
    if attributes is None:
        return [operand, primitives.without_moving(collective, ctx, operand, wanted, params)]
    lowering = ffi_lowering(START_TARGET, has_side_effect=True)
    return [operand, *lowering(ctx.replace(avals_out=[wanted]), operand, **attributes)]


def _lower_done(collective: Collective, ctx: Any, operand: Any, buffer: Any, *, options: Options, **params: Any) -> Any:
    given, wanted = ctx.avals_in
    if not primitives.moves(collective, ctx, given, params):
        return [buffer]
    start = _producer(buffer)
    if start is None or _origin(operand) != _origin(start.operands[0]):
        raise ValueError(
            f"done() of {collective.kind} of {given.str_short()}: its future comes from another function. A future may not cross the "
            "boundary of jax.jit, scan, while, cond or any other function that is compiled apart: call done() in the function that called "
            "the start"
        )
    call = ir.DictAttr(start.attributes["mhlo.backend_config"])
    site = ir.IntegerAttr(call["site"]).value
    awaited = ctx.module_context.cached_primitive_lowerings.setdefault(DONE_TARGET, set())
    if site in awaited:
        raise ValueError(f"done() of {collective.kind} of {given.str_short()}: its future has been used already")
    awaited.add(site)
    lowering = ffi_lowering(DONE_TARGET, operand_output_aliases={1: 0}, has_side_effect=True)
    return lowering(
        ctx,
        start.operands[0],  # not what comes through barriers: where XLA changes its layout, it does so once
        buffer,
        module=ir.StringAttr(call["module"]).value,
        site=site,
        what=f"{collective.kind} of {given.str_short()}",
        bytes=wanted.size * wanted.dtype.itemsize,
    )


def _origin(value: ir.Value) -> ir.Value:
    """The value behind any number of optimization barriers."""
    while (operation := _operation(value)) is not None and operation.name == "stablehlo.optimization_barrier":
        value = operation.operands[ir.OpResult(value).result_number]
    return value


def _producer(buffer: ir.Value) -> ir.Operation | None:
    """The start that fills this buffer."""
    operation = _operation(_origin(buffer))
    if operation is None or operation.name != "stablehlo.custom_call":
        return None
    return operation if ir.StringAttr(operation.attributes["call_target_name"]).value == START_TARGET else None


def _operation(value: ir.Value) -> ir.Operation | None:
    """What has `value` as a result; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


# The staged form.


def _transposed_staged(collective: Collective, params: Params) -> Params:
    transposed = _transposed(collective, params)
    if transposed is None:
        raise NotImplementedError(f"the gradient of {collective.kind}_start(staged=True), which is a reduction: leave staged out")
    return transposed


def _transpose_staged_done(collective: Collective, cotangent: Any, handle: Any, *, shape: Any, dtype: Any, **params: Any) -> Any:
    return [HALVES[collective.twin].staged_start.bind(cotangent, **_transposed_staged(collective, params))]


def _transpose_staged_start(collective: Collective, handle: Any, operand: Any, **params: Any) -> Any:
    aval = operand.aval
    transposed = _transposed_staged(collective, params) | {"shape": aval.shape, "dtype": aval.dtype}
    return [HALVES[collective.twin].staged_done.bind(handle, **transposed)]


def _batch_staged_start(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    """The transfer is one; its handle is repeated, so that done sees that it is batched."""
    operand = jnp.moveaxis(operands[0], dims[0], 0)
    handle = HALVES[collective.twin].staged_start.bind(operand, **_batched(collective, axis, params))
    return jnp.broadcast_to(handle, (axis.size, 2)), 0


def _batch_staged_done(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    handle = lax.index_in_dim(operands[0], 0, dims[0], keepdims=False)
    params = _batched(collective, axis, params) | {"shape": (axis.size, *params["shape"])}
    return HALVES[collective.twin].staged_done.bind(handle, **params), 0


def _lower_staged_start(collective: Collective, ctx: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    (given,) = ctx.avals_in
    result = collective.twin.abstract_eval(given, **params)[0]
    attributes = primitives.call_attributes(collective, ctx, given, result, options, params)
    if attributes is None:
        raise NotImplementedError(f"{collective.kind}_start(staged=True) of {given.str_short()}, of which nothing moves: leave staged out")
    return ffi_lowering(STAGED_START_TARGET, has_side_effect=True)(ctx, operand, **attributes)


def _lower_staged_done(collective: Collective, ctx: Any, handle: Any, **params: Any) -> Any:
    (wanted,) = ctx.avals_out
    lowering = ffi_lowering(STAGED_DONE_TARGET, has_side_effect=True)
    what = f"{collective.kind} with a result of {wanted.str_short()}"
    module = primitives.module_name(ctx)
    return lowering(ctx, handle, module=module, site=0, what=what, bytes=wanted.size * wanted.dtype.itemsize)


HALVES.update({collective.twin: _define(collective) for collective in primitives.COLLECTIVES if not collective.one_sided})
