"""A collective in two primitives: `start` begins the transfer, `done` awaits it, and computation comes between.

`start(x)` gives (x, buffer): the operand as it was, and where the result is being written. `done(x, buffer)` gives the result, in that same
buffer. The engine uses both until done, so nothing may copy or reuse them; `done` takes both to keep them alive. The lowering of done
checks that they come straight from a start, the handlers check that they have not moved.

Both are linear, and transposition turns one into the other: the transpose of done starts the transposed transfer of the cotangent, that
of start awaits it. The cotangent of `buffer` is then the operand of that transfer, and the cotangent of `x` the buffer that it fills,
which have the right shapes. Whatever ordered computation between start and done does so in the backward pass. Gathers and broadcasts
are transposed into reductions, which are jax.lax's and have no halves: there the transpose of start does it all.

Sends and receives have a token on one side, which can't go everywhere and which no future holds, and are not linear. `start(x)` of a send
does all that there is to do, for a send waits for nobody, and gives a receipt, an array without a meaning; `done(receipt)` gives the token.
`start(token)` of a receive gives the buffer, and `done(buffer)` the result in it.

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
from jax._src import core
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import parallel
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive
from jax.ffi import ffi_lowering

from hoccl_jax import primitives
from hoccl_jax.primitives import DONE_TARGET, START_TARGET, Collective, Options, Params

STAGED_START_TARGET = "hoccl_staged_start"
STAGED_DONE_TARGET = "hoccl_staged_done"


@dataclasses.dataclass(frozen=True)
class Halves:
    """Those of sends have no staged form."""

    start: Primitive
    done: Primitive
    staged_start: Primitive
    staged_done: Primitive
    takes_carrier: bool  # the start wants its operand in the type in which it lies in the engine's buffers

    @staticmethod
    def of(twin: Primitive, takes_carrier: bool = True) -> Halves:
        start, done, staged_start, staged_done = (
            Primitive(f"hoccl_{twin.name}_{half}") for half in ("start", "done", "staged_start", "staged_done")
        )
        return Halves(start, done, staged_start, staged_done, takes_carrier)


HALVES: dict[Primitive, Halves] = {}
"""By the twin of the collective."""


def _define(collective: Collective) -> Halves:
    twin = collective.twin
    halves = Halves.of(twin)
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


def _define_message(collective: Collective) -> Halves:
    """A send, or a receive. The dtype is in the attributes by which the two find each other, so it stays the user's: a send's call converts
    its operand, and the buffer of a receive has another type than its result."""
    twin = collective.twin
    halves = Halves.of(twin, takes_carrier=False)
    start, done = halves.start, halves.done
    start.multiple_results = True

    def start_types(operand: Any, *, options: Options, **params: Any) -> Any:
        result, effects = twin.abstract_eval(operand, **params)
        if collective.kind == "recv":
            return [result.update(dtype=primitives.carrier(result.dtype))], effects
        moves = operand.size > 0 and bool(params["perm"])
        return [operand.update(shape=(int(moves),), dtype=np.dtype(np.uint8), weak_type=False)], effects

    def done_type(started: Any, *, options: Options, **params: Any) -> Any:
        effects = twin.abstract_eval(started, **params)[1]  # which keep it where nobody uses the result
        return core.abstract_token if collective.kind == "send" else started, effects

    start.def_effectful_abstract_eval(start_types)
    done.def_effectful_abstract_eval(done_type)
    batching.fancy_primitive_batchers[start] = partial(_batch_message, collective)
    lower_start, lower_done = (_lower_send_start, _lower_send_done) if collective.kind == "send" else (_lower_recv_start, _lower_recv_done)
    for platform in primitives.PLATFORMS:
        mlir.register_lowering(start, partial(lower_start, collective), platform=platform, cacheable=False)
        mlir.register_lowering(done, partial(lower_done, collective), platform=platform, cacheable=False)
    mlir.register_lowering(start, partial(_refuse_platform, twin))
    if collective.kind == "recv":
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
    names = primitives.axis_names(params["axis_name"])
    if axis.name in names:
        raise NotImplementedError(f"{collective.kind}_start over the vmapped axis {axis.name!r}: use {collective.kind}")
    axes = ("all_gather_dimension", "split_axis", "concat_axis")
    return params | {name: params[name] + 1 for name in axes if name in params}


def _batch_start(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    (operand,), (dim,) = operands, dims
    batched = _batched(collective, axis, params)  # also refuses the mapped axis
    if dim is None:
        return HALVES[collective.twin].start.bind(operand, **params), (dim, dim)
    return HALVES[collective.twin].start.bind(jnp.moveaxis(operand, dim, 0), **batched), (0, 0)


def _batch_done(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    if all(dim is None for dim in dims):
        return HALVES[collective.twin].done.bind(*operands, **params), None
    if tuple(dims) != (0, 0):
        raise ValueError(f"done() of {collective.kind}: its future was rebuilt under vmap; call done() of what the start returned")
    return HALVES[collective.twin].done.bind(*operands, **_batched(collective, axis, params)), 0


def _batch_message(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    raise NotImplementedError(f"{collective.twin.name}_start under vmap: the other side can't know what is batched")


# Lowering. Both calls have side effects: two starts of the same data are two, and a start stays where it is.


def _lower_start(collective: Collective, ctx: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    given, wanted = ctx.avals_out
    attributes = primitives.call_attributes(collective, ctx, given, wanted, options, params)
    if attributes is None:
        return [operand, primitives.without_moving(collective, ctx, operand, wanted, params)]
    primitives.refuse_automatic_axes(ctx, f"{collective.twin.name}_start")
    lowering = ffi_lowering(START_TARGET, has_side_effect=True)
    return [operand, *lowering(ctx.replace(avals_out=[wanted]), operand, **attributes)]


def _lower_done(collective: Collective, ctx: Any, operand: Any, buffer: Any, *, options: Options, **params: Any) -> Any:
    given = ctx.avals_in[0]
    if not primitives.moves(collective, ctx, given, params):
        return [buffer]
    what = f"{collective.kind} of {given.str_short()}"
    start = _start_of(what, ctx, buffer, operand)
    # Not the operand that comes through barriers: where XLA changes its layout, it does so once.
    return _call_done(what, ctx, start, start.operands[0], buffer)


def _start_of(what: str, ctx: Any, result: ir.Value, operand: ir.Value | None = None) -> ir.Operation:
    """The start that gave a done this result and, where done takes it too, this operand. Each has one done."""
    start = primitives.operation_of(primitives.origin(result))
    if start is not None and (
        primitives.target_of(start) != START_TARGET
        or (operand is not None and primitives.origin(operand) != primitives.origin(start.operands[0]))
    ):
        start = None
    if start is None:
        raise ValueError(
            f"done() of {what}: its future comes from another function. A future may not cross the boundary of jax.jit, scan, while, cond "
            "or any other function that is compiled apart: call done() in the function that called the start"
        )
    call = ir.DictAttr(start.attributes["mhlo.backend_config"])
    awaited = ctx.module_context.cached_primitive_lowerings.setdefault(DONE_TARGET, set())
    key = ir.StringAttr(call["kind"]).value, ir.IntegerAttr(call["site"]).value  # a send and its receive share a site
    if key in awaited:
        raise ValueError(f"done() of {what}: its future has been used already")
    awaited.add(key)
    return start


def _call_done(what: str, ctx: Any, start: ir.Operation, operand: ir.Value, result: ir.Value) -> Any:
    """Gives `result`, in the same buffer; a token where it is a send's."""
    call = ir.DictAttr(start.attributes["mhlo.backend_config"])
    kind = ir.StringAttr(call["kind"]).value
    aval = ctx.avals_in[-1]
    lowering = ffi_lowering(DONE_TARGET, operand_output_aliases=None if kind == "send" else {1: 0}, has_side_effect=True)
    return lowering(
        ctx.replace(avals_in=[core.abstract_token if kind == "recv" else ctx.avals_in[0], aval]),
        operand,
        result,
        module=ir.StringAttr(call["module"]).value,
        site=ir.IntegerAttr(call["site"]).value,
        kind=kind,
        what=what,
        bytes=aval.size * aval.dtype.itemsize,
    )


# Sends and receives.


def _lower_send_start(collective: Collective, ctx: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    """The call gives a token too, for the receives that must come after it."""
    (given,), (receipt,) = ctx.avals_in, ctx.avals_out
    attributes = primitives.call_attributes(collective, ctx, given, receipt, options, params)
    if attributes is None:
        return [mlir.full_like_aval(ctx, 0, receipt)]
    carried = given.update(dtype=primitives.carrier(given.dtype))
    inner = ctx.replace(avals_in=[carried], avals_out=[receipt, core.abstract_token])
    value = primitives.convert(ctx, operand, given, carried)
    results: Any = ffi_lowering(START_TARGET, has_side_effect=True)(inner, value, **attributes)
    primitives.sends(ctx).append(results[1])
    return [results[0]]


def _lower_send_done(collective: Collective, ctx: Any, receipt: Any, *, options: Options, **params: Any) -> Any:
    if ctx.avals_in[0].size == 0:  # nothing was to be sent
        return [hlo.create_token()]
    return _call_done(collective.kind, ctx, _start_of(collective.kind, ctx, receipt), receipt, receipt)


def _lower_recv_start(collective: Collective, ctx: Any, token: Any, *, options: Options, **params: Any) -> Any:
    (given,), (buffer,) = ctx.avals_in, ctx.avals_out
    attributes = primitives.call_attributes(collective, ctx, given, params["out_shape"], options, params)
    if attributes is None:
        return [primitives.without_moving(collective, ctx, token, buffer, params)]
    _receives(ctx)[attributes["site"]] = attributes
    return ffi_lowering(START_TARGET, has_side_effect=True)(ctx, token, **attributes)


def _refuse_platform(twin: Primitive, ctx: Any, *operands: Any, **params: Any) -> Any:
    raise NotImplementedError(f"{twin.name}_start has only been made for CPU and CUDA devices: use {twin.name}")


def _receives(ctx: Any) -> dict[int, Params]:
    """The attributes of the receives that have been started in the module, by site."""
    return ctx.module_context.cached_primitive_lowerings.setdefault(START_TARGET, {})


def _lower_recv_done(collective: Collective, ctx: Any, buffer: Any, *, options: Options, **params: Any) -> Any:
    """Takes the tokens of all sends before it in its function. XLA knows of no other order between them, and a receive that is awaited
    before a send of the same rank could wait for ever."""
    wanted = params["out_shape"]
    if not primitives.moves(collective, ctx, wanted, params):
        return [buffer]
    what = f"{collective.kind} of {wanted.str_short()}"
    start = _start_of(what, ctx, buffer)
    site = ir.IntegerAttr(ir.DictAttr(start.attributes["mhlo.backend_config"])["site"]).value
    primitives.check_sender(ctx, start.operands[0], _receives(ctx)[site])  # only now: the start may come before the send
    before = primitives.sends_here(ctx)
    return _call_done(what, ctx, start, hlo.after_all([start.operands[0], *before]), buffer)


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
    batched = _batched(collective, axis, params)  # also refuses the mapped axis
    if dims[0] is None:
        return HALVES[collective.twin].staged_start.bind(operands[0], **params), None
    operand = jnp.moveaxis(operands[0], dims[0], 0)
    handle = HALVES[collective.twin].staged_start.bind(operand, **batched)
    return jnp.broadcast_to(handle, (axis.size, 2)), 0


def _batch_staged_done(collective: Collective, axis: Any, operands: Any, dims: Any, **params: Any) -> Any:
    if dims[0] is None:
        return HALVES[collective.twin].staged_done.bind(operands[0], **params), None
    handle = lax.index_in_dim(operands[0], 0, dims[0], keepdims=False)
    params = _batched(collective, axis, params) | {"shape": (axis.size, *params["shape"])}
    return HALVES[collective.twin].staged_done.bind(handle, **params), 0


def _lower_staged_start(collective: Collective, ctx: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    (given,) = ctx.avals_in
    result = collective.twin.abstract_eval(given, **params)[0]
    attributes = primitives.call_attributes(collective, ctx, given, result, options, params, even_alone=True)
    if attributes is None:
        return [mlir.ir_constant(np.zeros(ctx.avals_out[0].shape, ctx.avals_out[0].dtype))]  # a handle that stands for zeros
    if collective.kind == "recv":
        primitives.check_sender(ctx, operand, attributes)
    primitives.refuse_automatic_axes(ctx, f"{collective.twin.name}_start")
    return ffi_lowering(STAGED_START_TARGET, has_side_effect=True)(ctx, operand, **attributes)


def _lower_staged_done(collective: Collective, ctx: Any, handle: Any, **params: Any) -> Any:
    (wanted,) = ctx.avals_out
    lowering = ffi_lowering(STAGED_DONE_TARGET, has_side_effect=True)
    what = f"{collective.kind} with a result of {wanted.str_short()}"
    module = primitives.module_name(ctx)
    return lowering(ctx, handle, module=module, site=0, kind=collective.kind, what=what, bytes=wanted.size * wanted.dtype.itemsize)


HALVES.update({each.twin: (_define_message if each.one_sided else _define)(each) for each in primitives.COLLECTIVES})
