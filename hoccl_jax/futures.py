"""Transfers in two halves, and order between transfers and computation.

A `*_start` function begins what its namesake does and returns a `Future`; `.done()` gives the result. What the program computes in between
runs beside the transfer:

    future = hoccl_jax.ppermute_start(x, "stage", perm)
    received, y = hoccl_jax.overlap(future, layer, x, parameters)

Plain collectives overlap as well where XLA sees that it pays (see `hoccl_jax.collectives`); here the program says where.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import parallel
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive

from hoccl_jax import collectives, primitives
from hoccl_jax.collectives import AxisName, Priority, checked_options
from hoccl_jax.config import Config
from hoccl_jax.future_primitives import HALVES


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function of jax.lax with its arguments after the operand."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    options: primitives.Options
    staged: bool

    def __call__(self, operand: Any) -> Any:
        return self.function(operand, *self.arguments, **dict(self.keywords))


class _Captured(Exception):
    """Leaves a function of jax.lax at its collective."""


class _Capture(core.Trace):
    """While it is the current trace, binding a collective of jax.lax starts ours, and leaves the function that does it."""

    def __init__(self, around: core.Trace, call: _Call):
        super().__init__()
        self._around = around
        self._call = call
        self.started: tuple[Any, ...] = ()

    def process_primitive(self, primitive: Primitive, tracers: Any, params: dict[str, Any], /) -> Any:
        with core.set_current_trace(self._around):
            if primitive not in HALVES:
                return primitive.bind(*tracers, **params)
            (operand,) = tracers
            halves = HALVES[primitive]
            if halves.takes_carrier:
                # The engine keeps elements narrower than a byte in bytes. Converting here, not in the lowering: start and done need one
                # buffer.
                operand = lax.convert_element_type(operand, primitives.carrier(operand.dtype))
            start = halves.staged_start if self._call.staged else halves.start
            started = start.bind(operand, options=self._call.options, **params)
            self.started = (started,) if self._call.staged else tuple(started)
        raise _Captured


class _Resume(core.Trace):
    """While it is the current trace, the collective of jax.lax gives what done gives."""

    def __init__(self, around: core.Trace, call: _Call, started: tuple[Any, ...]):
        super().__init__()
        self._around = around
        self._call = call
        self._started = started

    def process_primitive(self, primitive: Primitive, tracers: Any, params: dict[str, Any], /) -> Any:
        with core.set_current_trace(self._around):
            if primitive not in HALVES:
                return primitive.bind(*tracers, **params)
            wanted = primitive.abstract_eval(core.typeof(tracers[0]), **params)[0]
            halves = HALVES[primitive]
            if self._call.staged:
                carried = primitives.carrier(wanted.dtype)
                done: Callable[..., Any] = functools.partial(halves.staged_done.bind, shape=wanted.shape, dtype=carried)
            else:
                done = halves.done.bind
            result = done(*self._started, options=self._call.options, **params)
            return result if wanted is core.abstract_token else lax.convert_element_type(result, wanted.dtype)


@jax.tree_util.register_pytree_node_class
class Future:
    """A transfer on its way. Made by the `*_start` functions.

    `done()` must be called exactly once, in the function that called the start: XLA knows nothing of the transfer, and whatever makes it
    copy or free the buffers in between breaks it. So a future may not be returned from `jax.jit`, nor be an argument of one, nor be carried
    through `scan`, `while_loop`, `fori_loop` or `cond`. It may be made and used inside any of these, and, but for messages, inside
    `jax.checkpoint`, `jax.grad` and `jax.vmap`. Where a future goes wrong is mostly found when the program is compiled, in any case when
    it runs:

    - one that comes from another compiled function: ValueError at compilation;
    - one that is used twice: ValueError at tracing or compilation, or an error of the program;
    - one that is dropped, or leaves the program: an error of the program, before anything is sent (or nothing at all, where JAX removes the
      start because nothing uses it);
    - one whose buffer XLA has copied: an error of the program.

    A future whose result, rather than itself, is of no use goes with it: where nothing uses what done() or `overlap` gives, nothing moves.

    An error of another part of the program between start and done, such as an exception in a callback, frees buffers under a transfer that
    runs; hoccl_jax's own errors wait for it.

    Differentiation turns done into a start and start into a done, so that transfers of cotangents overlap as well. (The transposes of
    gathers and broadcasts are reductions of jax.lax, as a whole.)

    A future that was started with `staged=True` lives in buffers of hoccl_jax's own, and may be carried through anything; what is said
    above of buffers does not concern it. A loop may drop the one that its last round started. It costs a copy of the operand and one of the
    result. Only CPU devices have it; gathers and broadcasts have no gradient then.

    Random keys are moved as a whole, at the start.

    A future is a pytree of arrays, so that `jax.lax.optimization_barrier` and `overlap` can order it. Its leaves are of no other use.
    """

    def __init__(self, call: _Call, pending: Sequence[tuple[Any, ...]], types: Sequence[Any], structure: Any):
        self._call = call
        self._pending = tuple(pending)  # for each leaf of the operand what its start gave
        self._types = tuple(types)  # of the leaves; None where nothing was started and `pending` holds the result
        self._structure = structure
        self._used = False

    def done(self) -> Any:
        """The result, of the shapes and types that the namesake of the start function gives.

        Raises:
          ValueError: the future has been used already.
        """
        self._use()
        leaves = [_done(self._call, started, aval) for started, aval in zip(self._pending, self._types, strict=True)]
        result = jax.tree.unflatten(self._structure, leaves)
        return primitives.received(result, self._call.arguments[1]) if self._call.function is parallel.precv else result

    def _use(self) -> None:
        if self._used:
            raise ValueError(f"the future of {self._call.function.__name__} has been used already: call done(), or overlap(), once")
        self._used = True

    def tree_flatten(self) -> tuple[Any, Any]:
        return self._pending, (self._call, self._types, self._structure)

    @classmethod
    def tree_unflatten(cls, static: Any, pending: Any) -> Future:
        call, types, structure = static
        return cls(call, pending, types, structure)


def _start(function: Callable[..., Any], priority: str, staged: bool, operand: Any, *arguments: Any, **keywords: Any) -> Future:
    options = checked_options(priority, None)
    frozen = tuple((name, _frozen(value)) for name, value in keywords.items())
    call = _Call(function, _frozen(arguments), frozen, options, staged)
    # Behind a barrier: XLA fuses a slice into the custom calls that take it, start and done each, and forgets that done's result is
    # the start's buffer.
    leaves, structure = jax.tree.flatten(barrier((), operand)[1])
    begun = [_begin(call, leaf) for leaf in leaves]
    return Future(call, [started for started, _ in begun], [aval for _, aval in begun], structure)


def _begin(call: _Call, leaf: Any) -> tuple[tuple[Any, ...], Any]:
    """What the start gave, and the type of the operand; or the result, and None."""
    aval = core.typeof(leaf)
    if Config.from_env().disable:
        return (call(leaf),), None
    if aval is not core.abstract_token and _is_key(aval):  # few bytes, which have no halves
        whole = getattr(collectives, call.function.__name__)
        return (whole(leaf, *call.arguments, **dict(call.keywords), priority=call.options.priority),), None
    with core.take_current_trace() as around:
        capture = _Capture(around, call)
        try:
            with core.set_current_trace(capture):
                return (call(leaf),), None  # there was no collective
        except _Captured:
            return capture.started, aval


def _is_key(aval: Any) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def _done(call: _Call, started: tuple[Any, ...], aval: Any) -> Any:
    if aval is None:
        return started[0]
    operand = _any_of(aval)  # what the function does before its collective goes to waste
    with core.take_current_trace() as around, core.set_current_trace(_Resume(around, call, started)):
        return call(operand)


def _any_of(aval: Any) -> Any:
    """Some value of this type."""
    if aval is core.abstract_token:
        return lax.create_token()
    value = lax.full(aval.shape, 0, aval.dtype)
    varying = tuple(aval.mat.varying)
    return lax.pcast(value, varying, to="varying") if varying else value


def _frozen(value: Any) -> Any:
    """Lists, in which permutations and groups may be given, as tuples, so that equal calls compare equal."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def overlap(future: Any, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Computes `function(*arguments)` while the future's transfer is on its way.

    The transfer starts before anything that needs `arguments` (which should therefore be all that the function computes with), and is
    awaited when the function's results are there. In the backward pass, the transfer of the cotangents is ordered around the
    function's gradient in the same way.

    Args:
      future: from a `*_start` function, or a pytree of such futures; this is their one use.
      function: any function of arrays.
      arguments: pytrees of arrays.

    Returns:
      (the result of the transfer, or a pytree of results; the result of the function).
    """
    futures, structure = jax.tree.flatten(future, is_leaf=lambda node: isinstance(node, Future))
    if wrong := [each for each in futures if not isinstance(each, Future)]:
        raise TypeError(f"overlap: future must be a Future, or a pytree of them, got {type(wrong[0]).__name__}")
    for each in futures:
        each._use()
    futures, arguments = barrier(futures, arguments)
    computed = function(*arguments)
    futures, computed = barrier(futures, computed)
    return jax.tree.unflatten(structure, [each.done() for each in futures]), computed


def all_gather_start(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: Literal["varying", "reduced", "invarying"] = "varying",
    priority: Priority = "foreground",
    staged: bool = False,
) -> Future:
    """Begins an `all_gather`, whose arguments it takes. `staged`: see `Future`.

    Its gradient is reduced by jax.lax.psum_scatter, as a whole.
    """
    return _start(lax.all_gather, priority, staged, x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to)


def all_to_all_start(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    priority: Priority = "foreground",
    staged: bool = False,
) -> Future:
    """Begins an `all_to_all`, whose arguments it takes. `staged`: see `Future`."""
    return _start(lax.all_to_all, priority, staged, x, axis_name, split_axis, concat_axis, axis_index_groups=axis_index_groups, tiled=tiled)


def ppermute_start(
    x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, priority: Priority = "foreground", staged: bool = False
) -> Future:
    """Begins a `ppermute`, whose arguments it takes. `staged`: see `Future`."""
    return _start(lax.ppermute, priority, staged, x, axis_name, perm)


def pshuffle_start(x: Any, axis_name: AxisName, perm: Sequence[int], *, priority: Priority = "foreground", staged: bool = False) -> Future:
    """Begins a `pshuffle`, whose arguments it takes. `staged`: see `Future`."""
    return _start(lax.pshuffle, priority, staged, x, axis_name, perm)


def pbroadcast_start(x: Any, axis_name: AxisName, source: int, *, priority: Priority = "foreground", staged: bool = False) -> Future:
    """Begins a `pbroadcast`, whose arguments it takes. `staged`: see `Future`. Its gradient is reduced by jax.lax.psum, as a whole."""
    return _start(parallel.pbroadcast, priority, staged, x, primitives.axis_names(axis_name), source)


def psend_start(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, priority: Priority = "foreground") -> Future:
    """Begins a `psend`, whose arguments it takes; done() gives its token, for each array of x.

    A send waits for nobody, so the start is all of it: there x is copied where the receiver is not waiting yet, in the program's order. The
    future says where the program goes on after the send, and is used like any other. There is no vmap and no differentiation.
    """
    return _start(parallel.psend, priority, False, x, axis_name, perm)


def precv_start(
    token: Any,
    out_shape: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    priority: Priority = "foreground",
    staged: bool = False,
) -> Future:
    """Begins a `precv`, whose arguments it takes: from here on the message may arrive. `staged`: see `Future`.

    The k-th receive takes the k-th equal send, in the order in which they are traced; starts and plain calls count alike, and done() does
    not count. The start waits for nothing, so it may come before its psend, with any token (`jax.lax.create_token()`, for example), and
    receives may end in any order:

        future = hoccl_jax.precv_start(jax.lax.create_token(), like, "stage", perm)
        future, x = jax.lax.optimization_barrier((future, x))  # open before the layer begins, not only when XLA sees fit
        hoccl_jax.psend(layer(x), "stage", perm)
        received = future.done()

    done() comes after all psends that have been traced before it in the same function (jit, loop body, branch). A psend of another
    function, and for a staged future any psend, must come before the start, which is what its token given as `token` says.

    There is no differentiation: what is received is a constant, and operands of messages go through jax.lax.stop_gradient. TypeError,
    ValueError: as `precv`; a staged receive takes no psend that is traced after it. Random keys only `precv` receives.
    """
    primitives.check_tokens("precv_start", token)
    like = jax.ShapeDtypeStruct(out_shape.shape, out_shape.dtype)
    if _is_key(like):
        wanted = core.ShapedArray(like.shape, like.dtype).str_short()
        raise NotImplementedError(f"precv_start of {wanted}: a message of keys is received as a whole, by precv")
    return _start(parallel.precv, priority, staged, token, like, axis_name, perm)


def prefetch_barrier(operands: Any, after: Any) -> tuple[Any, Any]:
    """Bounds a prefetch: what uses the returned `operands` starts no earlier than `after` has been computed.

    XLA starts independent transfers as early as it can, up to a whole network ahead, and keeps all their results. In

        shard, x = hoccl_jax.prefetch_barrier(shard, x)
        ahead = hoccl_jax.all_gather(shard, "fsdp", tiled=True)  # the parameters of the next layer
        x = layer(x, weights)                                    # this layer

    the gather starts when x, the input of this layer, is there, and runs while the layer computes. The barrier orders, and moves nothing.
    In the backward pass it does the same for the transfers of gradients.

    Args:
      operands: pytree of arrays, the operands of the transfers.
      after: pytree of arrays, computed before and used after.

    Returns:
      (operands, after), to be used in place of the arguments.
    """
    return barrier((), (operands, after))[1]


def barrier(futures: Any, values: Any) -> tuple[Any, Any]:
    """jax.lax.optimization_barrier, but for three things: values keep their types under check_vma, and cotangents that are zero stay
    symbolic, in all versions of jax; and a future whose result nothing uses does not stay because of it."""
    leaves, structure = jax.tree.flatten((futures, values))
    count = len(jax.tree.leaves(futures))
    of_futures = (True,) * count + (False,) * (len(leaves) - count)
    return jax.tree.unflatten(structure, _barrier_p.bind(*leaves, of_futures=of_futures))


_barrier_p = Primitive("hoccl_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_impl(lambda *values, of_futures: jax.lax.optimization_barrier(values))
_barrier_p.def_abstract_eval(lambda *avals, of_futures: list(avals))
mlir.register_lowering(_barrier_p, lambda ctx, *values, of_futures: hlo.OptimizationBarrierOp(values).results)
batching.primitive_batchers[_barrier_p] = lambda operands, dims, of_futures: (_barrier_p.bind(*operands, of_futures=of_futures), dims)


def _those(chosen: Sequence[bool], values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value for value, there in zip(values, chosen, strict=True) if there)


def _bind_nonzero(values: Sequence[Any], of_futures: Sequence[bool]) -> list[Any]:
    """Binds what is not a symbolic zero."""
    present = [not isinstance(value, ad.Zero) for value in values]
    bound = iter(_barrier_p.bind(*_those(present, values), of_futures=_those(present, of_futures)) if any(present) else ())
    return [next(bound) if there else value for value, there in zip(values, present, strict=True)]


def _barrier_jvp(primals: Any, tangents: Any, *, of_futures: Any) -> Any:
    return _barrier_p.bind(*primals, of_futures=of_futures), _bind_nonzero(tangents, of_futures)


def _barrier_transpose(cotangents: Any, *_primals: Any, of_futures: Any) -> Any:
    return _bind_nonzero(cotangents, of_futures)


def _remove_unused(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    """Where a done has been removed because nothing uses its result, the start must go as well."""
    of_futures = equation.params["of_futures"]
    kept = [any(used) and (there or not droppable) for there, droppable in zip(used, of_futures, strict=True)]
    if not any(kept):
        return kept, None
    return kept, equation.replace(
        invars=list(_those(kept, equation.invars)),
        outvars=list(_those(kept, equation.outvars)),
        params={"of_futures": _those(kept, of_futures)},
    )


ad.primitive_jvps[_barrier_p] = _barrier_jvp
ad.primitive_transposes[_barrier_p] = _barrier_transpose
pe.dce_rules[_barrier_p] = _remove_unused
