"""The JAX primitives of hoccl_jax and their rules.

Each primitive has a **twin**: the primitive of `jax.lax` with the same meaning, whose parameters it takes, plus `options`. The rules for
types, effects, transposition and batching are the twin's own, run under a trace that binds our primitives in place of twins; so results
and errors are those of the installed jax.lax by construction. Only the lowering is ours: one custom call (docs/design.md lists its
attributes) on the platforms that the engine serves, the twin elsewhere. On CUDA the call stands on a stream of its own, so that XLA
overlaps it with what does not depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import parallel
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func, hlo, sdy
from jax._src.mesh import Mesh, get_abstract_mesh
from jax.extend.core import Primitive

from hoccl_jax import runtime

TARGET = "hoccl_collective"
START_TARGET = "hoccl_start"  # the halves of hoccl_jax.future_primitives
DONE_TARGET = "hoccl_done"
PLATFORMS = ("cpu", "cuda")
PRIORITIES = {"foreground": 0, "background": 1}


class Options(NamedTuple):
    """What our functions take beyond those of jax.lax."""

    priority: str = "foreground"
    overlap: bool = True  # on CUDA: on a stream beside the program's


Params = dict[str, Any]
Groups = Sequence[Sequence[int]]  # partition indices of the mesh (not device ids), group after group, in rank order


@dataclasses.dataclass(frozen=True)
class Form:
    """What a primitive asks of the engine for one operand: the attributes of the custom call that depend on the kind."""

    shape: tuple[int, ...]
    split_axis: int = -1
    concat_axis: int = -1
    pairs: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Collective:
    """A row of the table that drives everything below. `form` takes (ctx, groups, shape, twin's parameters)."""

    kind: str
    twin: Primitive
    form: Callable[[Any, Groups, tuple[int, ...], Params], Form]
    differentiable: bool = True

    @property
    def one_sided(self) -> bool:
        """A send or a receive: one operand or result is a token."""
        return self.kind in ("send", "recv")

    @property
    def has_pairs(self) -> bool:
        return self.kind not in ("all_gather", "all_to_all")


class Redirect(core.Trace):
    """While it is the current trace, binding a twin binds our primitive; anything else goes through to the trace around it."""

    def __init__(self, around: core.Trace, options: Options):
        super().__init__()
        self._around = around
        self._options = options

    def process_primitive(self, primitive: Primitive, tracers: Any, params: Params, /) -> Any:
        with core.set_current_trace(self._around):
            ours = PRIMITIVES.get(primitive)
            if ours is None:
                return primitive.bind(*tracers, **params)
            return ours.bind(*tracers, options=self._options, **params)


def redirected(function: Callable[..., Any], options: Options, *args: Any, **kwargs: Any) -> Any:
    """Calls `function`, made of `jax.lax` primitives, with our collectives in place of theirs."""
    with core.take_current_trace() as around, core.set_current_trace(Redirect(around, options)):
        return function(*args, **kwargs)


# The forms. An untiled gather is the tiled one of a shape with a dimension of size 1 inserted. jax.lax brings untiled all-to-alls into
# tiled form before it binds.


def _gather_form(_ctx: Any, _groups: Groups, shape: tuple[int, ...], params: Params) -> Form:
    axis = params["all_gather_dimension"]
    return Form(shape if params["tiled"] else (*shape[:axis], 1, *shape[axis:]), concat_axis=axis)


def _all_to_all_form(_ctx: Any, _groups: Groups, shape: tuple[int, ...], params: Params) -> Form:
    return Form(shape, split_axis=params["split_axis"], concat_axis=params["concat_axis"])


def _pair_form(name: str, ctx: Any, groups: Groups, shape: tuple[int, ...], params: Params) -> Form:
    size = len(groups[0])
    if "perm" not in params:
        return Form(shape, pairs=_pairs(name, size, params))
    # How jax.lax reads `perm` over several axes differs between its versions, so it is asked: it gives partition indices, groups first.
    read = partial(parallel._pcollectives_lowering_common, ctx, axis_name=params["axis_name"], op_name=name)
    read(perm=())  # refuses axes in an order that is not the mesh's
    _pairs(name, size, params)
    partitions, _ = read(perm=params["perm"])
    rank = {partition: rank for rank, partition in enumerate(groups[0])}
    return Form(shape, pairs=tuple((rank[int(src)], rank[int(dst)]) for src, dst in partitions[: len(params["perm"])]))


def _pairs(name: str, size: int, params: Params) -> tuple[tuple[int, int], ...]:
    """(source, destination) of a permutation or broadcast over one axis. Negative indices count from the end, as in jax.lax.

    Raises for what is no such thing the types of error that jax.lax raises, in its order.
    """
    if "perm" not in params:
        source = _rank(name, "source", params["source"], params["source"], size)
        return tuple((source, rank) for rank in range(size))
    perm = params["perm"]
    pairs = [(_integer(name, "perm", src, perm), _integer(name, "perm", dst, perm)) for src, dst in perm]
    if any(len({rank % size for rank in ranks}) < len(ranks) for ranks in zip(*pairs, strict=True)):
        raise ValueError(f"{name} sources and destinations must be unique, got {perm} in a group of size {size}")
    return tuple((_rank(name, "perm", src, perm, size), _rank(name, "perm", dst, perm, size)) for src, dst in pairs)


def _integer(name: str, argument: str, value: Any, given: Any) -> int:
    """A bool is none: it would be rank 0 or 1."""
    if isinstance(value, bool | np.bool_) or not hasattr(type(value), "__index__"):
        among = "" if value is given else f" in {given}"
        raise TypeError(f"{name}: {argument} must name ranks by integers, got {value!r}{among}")
    return operator.index(value)


def _rank(name: str, argument: str, value: Any, given: Any, size: int) -> int:
    rank = _integer(name, argument, value, given)
    if not -size <= rank < size:
        among = "" if value is given else f" of {given}"
        raise IndexError(f"{name}: {argument} names rank {rank}{among}, but the group's size is {size}")
    return range(size)[rank]


COLLECTIVES = (
    Collective("all_gather", parallel.all_gather_p, _gather_form),
    Collective("all_gather", parallel.all_gather_invariant_p, _gather_form),
    Collective("all_gather", parallel.all_gather_reduced_p, _gather_form),
    Collective("all_to_all", parallel.all_to_all_p, _all_to_all_form),
    Collective("ppermute", parallel.ppermute_p, partial(_pair_form, "ppermute")),
    Collective("pbroadcast", parallel.pbroadcast_p, partial(_pair_form, "pbroadcast")),
    Collective("send", parallel.psend_p, partial(_pair_form, "psend"), differentiable=False),
    Collective("recv", parallel.precv_p, partial(_pair_form, "precv"), differentiable=False),
)

PRIMITIVES: dict[Primitive, Primitive] = {}
"""Twin -> ours."""


def _define(collective: Collective) -> Primitive:
    twin = collective.twin
    primitive = Primitive(f"hoccl_{twin.name}")
    primitive.def_impl(lambda *args, options, **params: twin.impl(*args, **params))
    primitive.def_effectful_abstract_eval(lambda *avals, options, **params: twin.abstract_eval(*avals, **params))
    if collective.differentiable:
        ad.deflinear2(primitive, partial(transpose, collective))
    batching.fancy_primitive_batchers[primitive] = partial(_batch, collective)
    for platform in PLATFORMS:
        # Not cacheable: two equal calls are two call sites.
        mlir.register_lowering(primitive, partial(lower, collective, platform), platform=platform, cacheable=False)
    mlir.register_lowering(primitive, partial(_lower_twin, twin), cacheable=False)
    return primitive


# Transposition and batching: the twin's rules, but where those of the supported versions of jax.lax fail or are wrong. tests/unit/
# test_beyond_lax.py has an example of each.


def transpose(collective: Collective, cotangent: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    twin, axis_name = collective.twin, params["axis_name"]
    if twin is parallel.all_gather_p:
        # Tiled in any case: the untiled psum_scatter can't be vmapped over a later dimension.
        axis, groups = params["all_gather_dimension"], params["axis_index_groups"]
        block = lax.psum_scatter(cotangent, axis_name, scatter_dimension=axis, axis_index_groups=groups, tiled=True)
        return [block if params["tiled"] else lax.squeeze(block, [axis])]
    if twin is parallel.all_to_all_p:
        # On the primitive's shapes, which are tiled ones whatever `tiled` says.
        params |= {"split_axis": params["concat_axis"], "concat_axis": params["split_axis"]}
        return [PRIMITIVES[twin].bind(cotangent, options=options, **params)]
    if twin is parallel.pbroadcast_p:
        ((source, _), *_) = _pairs(collective.kind, lax.axis_size(axis_name), params)
        summed = jnp.where(lax.axis_index(axis_name) == source, lax.psum(cotangent, axis_name), 0)
        # Under vmap an array without elements loses what it varies over.
        return [core.pvary(summed, tuple(operand.aval.mat.varying - core.typeof(summed).mat.varying))]
    return redirected(ad.primitive_transposes[twin], options, cotangent, operand, **params)


def axis_names(axis_name: Any) -> tuple[Any, ...]:
    """The axes that act as one."""
    return tuple(axis_name) if isinstance(axis_name, list | tuple) else (axis_name,)


def _batch(collective: Collective, axis: Any, operands: Any, dims: Any, *, options: Options, **params: Any) -> Any:
    if collective.one_sided:
        raise NotImplementedError(f"{collective.twin.name} under vmap: the other side can't know what is batched")
    names = axis_names(params["axis_name"])
    if collective.has_pairs and axis.name in names:
        if len(names) > 1:
            raise NotImplementedError(f"{collective.kind} over a vmapped axis and others at once: {names}")
        (operand,), (dim,) = operands, dims
        return _permute_batched(operand, dim, axis.size, _pairs(collective.kind, axis.size, params))
    return redirected(batching.fancy_primitive_batchers[collective.twin], options, axis, operands, dims, **params)


def _permute_batched(operand: Any, dim: int | None, size: int, pairs: Sequence[tuple[int, int]]) -> tuple[Any, int | None]:
    """The permutation along a vmapped dimension; `dim` None: all indices have the same operand."""
    source = {dst: src for src, dst in pairs}
    if dim is None:
        if len(source) == size:
            return operand, None
        operand, dim = jnp.broadcast_to(operand, (size, *operand.shape)), 0
    moved = jnp.take(operand, np.array([source.get(index, 0) for index in range(size)]), axis=dim)
    if len(source) == size:
        return moved, dim
    receives = np.isin(np.arange(size), list(source)).reshape([-1 if axis == dim else 1 for axis in range(moved.ndim)])
    return jnp.where(receives, moved, jnp.zeros_like(moved)), dim


def _lower_twin(twin: Primitive, ctx: Any, *operands: Any, options: Options, **params: Any) -> Any:
    return mlir.lower_fun(lambda *args: twin.bind(*args, **params), multiple_results=False)(ctx, *operands)


def lower(collective: Collective, platform: str, ctx: Any, operand: Any, *, options: Options, **params: Any) -> Any:
    """Emits the custom call, or nothing but data where nothing moves."""
    named = _mesh_axes(ctx, params)
    (given,), (wanted,) = ctx.avals_in, ctx.avals_out
    attributes = call_attributes(collective, ctx, given, wanted, options, params)
    if attributes is None:
        return [without_moving(collective, ctx, operand, wanted, params)]
    if collective.kind == "recv":
        check_sender(ctx, operand, attributes)
    apart = platform == "cuda" and options.overlap and not collective.one_sided
    result = _call(ctx, operand, attributes, STREAMS[options.priority] if apart else None, named)
    if collective.kind == "send":
        sends(ctx).append(result)
    return [result]


def call_attributes(
    collective: Collective, ctx: Any, given: Any, wanted: Any, options: Options, params: Params, *, even_alone: bool = False
) -> Params | None:
    """The attributes of the custom call, which docs/design.md explains; None where nothing moves. Takes the call's number.

    `even_alone`: what a rank keeps for itself moves too, in a group that has no other.
    """
    runtime.register_targets()
    groups = _groups(ctx, params)
    if any(len(group) != len(groups[0]) for group in groups):
        raise ValueError(f"{collective.kind}: groups must be of one size, got {[len(group) for group in groups]}")
    if collective.one_sided:
        refuse_automatic_axes(ctx, f"p{collective.kind}")
    data = wanted if collective.kind == "recv" else given
    if not core.is_constant_shape(data.shape):
        raise NotImplementedError(f"{collective.kind}: symbolic shapes, got {data.shape}")
    physical = core.physical_aval(data)
    form = collective.form(ctx, groups, physical.shape, params)  # checks the ranks, also where nothing moves
    if not moves(collective, ctx, data, params, even_alone=even_alone):
        return None
    attributes = {
        "kind": collective.kind,
        "module": module_name(ctx),
        "groups": device_ids(ctx.module_context.axis_context.mesh, groups).reshape(-1),
        "group_size": len(groups[0]),
        "dtype": str(data.dtype),
        "itemsize": carrier(physical.dtype).itemsize,
        "shape": np.array(form.shape, np.int64),
        "split_axis": form.split_axis,
        "concat_axis": form.concat_axis,
        "pairs": np.array(form.pairs, np.int64).reshape(-1),
        "priority": PRIORITIES[options.priority],
        "beside": int(options.overlap),
    }
    attributes["site"] = _site(collective, ctx, attributes)
    return attributes


def refuse_automatic_axes(ctx: Any, what: str) -> None:
    """For calls with side effects: where XLA partitions the function over some axes of the mesh, it fails on these, or crashes."""
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", ())
    automatic = tuple(name for name, size in context.mesh.shape.items() if size > 1 and name not in manual)
    if automatic:
        raise NotImplementedError(
            f"{what} in a shard_map that leaves mesh axes {automatic} to XLA's partitioner, which can't place it: make the shard_map one "
            "over all axes of the mesh"
        )


def moves(collective: Collective, ctx: Any, data: Any, params: Params, *, even_alone: bool = False) -> bool:
    """Is there anything to move from one rank to another?"""
    alone = len(_groups(ctx, params)[0]) == 1 and not collective.one_sided
    return (even_alone or not alone) and data.size > 0 and bool(params.get("perm", True))


def _groups(ctx: Any, params: Params) -> Groups:
    return parallel._replica_groups(ctx.module_context.axis_context, params["axis_name"], params.get("axis_index_groups"))


STREAMS = {"foreground": "1", "background": "2"}
"""XLA's numbers of the streams that operations run on, so that a foreground operation does not queue behind a background one."""


def beside(ctx: Any, operands: Sequence[Any], stream: str, body: Callable[..., Any]) -> Any:
    """Emits `body` as a function that XLA:GPU calls on a stream of its own, as jax's compute_on("gpu_stream:N") does.

    The annotation alone makes XLA wait for the call at once. With the queue id its latency-hiding scheduler takes the call for
    asynchronous: it moves the start up and the wait down, and keeps the buffers alive between the two.
    """
    module = ctx.module_context
    result = mlir.aval_to_ir_type(module, ctx.avals_out[0])
    types = [operand.type for operand in operands]
    function = func.FuncOp("hoccl_beside", ir.FunctionType.get(types, [result]), ip=module.ip)
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    module.symbol_table.insert(function)  # makes the name unique
    with ir.InsertionPoint(function.add_entry_block()):
        func.ReturnOp([body(*function.arguments)])
    # XLA would move constants into the function after it has given them names that PTX can have, and then fail to assemble them.
    held = hlo.optimization_barrier(list(operands))
    held = [held] if isinstance(held, ir.Value) else list(held)
    call = func.CallOp([result], ir.FlatSymbolRefAttr.get(function.name.value), held)
    annotation = {"_xla_stream_annotation": stream, "inlineable": "false", "backend_config": json.dumps({"operation_queue_id": stream})}
    call.operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in annotation.items()})
    return call.results[0]


def _mesh_axes(ctx: Any, params: Params) -> Any:
    """The mesh and the axes of the groups as StableHLO's collectives have them, for who reads the program; None unless JAX does so."""
    find = getattr(parallel, "_try_mesh_axes_replica_group", None)  # since jax 0.11
    if find is None or params.get("axis_index_groups") is not None:
        return None
    found = find(ctx, params["axis_name"], None)
    if not hasattr(found, "mesh"):  # jax.config.use_rgv3 is off: a list of devices
        return None
    mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(str(name), size) for name, size in ctx.module_context.axis_context.mesh.shape.items()])
    return hlo.ReplicaGroupMeshAxesAttr.get(mesh, found.axes)


def _call(ctx: Any, operand: Any, attributes: Params, stream: str | None, mesh_axes: Any) -> Any:
    """The custom call, on a stream of its own if one is named. Elements narrower than a byte travel as bytes."""

    def carried(aval: Any) -> Any:
        if aval is core.abstract_token:
            return aval
        aval = core.physical_aval(aval)
        return aval.update(dtype=carrier(aval.dtype))

    (given,), (wanted,) = ctx.avals_in, ctx.avals_out
    inner = ctx.replace(avals_in=[carried(given)], avals_out=[carried(wanted)])
    operand = convert(ctx, operand, given, carried(given))
    # XLA:CPU runs a program that has side effects outside its fast path (90 us each time). A collective needs none: all ranks compile the
    # same program, so what XLA drops or merges it drops or merges on all of them. A send and its recv must stay even where nothing uses the
    # result.
    lowering = jax.ffi.ffi_lowering(TARGET, has_side_effect=attributes["kind"] in ("send", "recv"))

    def call(operand: Any) -> Any:
        (result,) = lowering(inner, operand, **attributes)
        assert isinstance(result, ir.Value)
        if mesh_axes is not None:
            ir.OpResult(result).owner.attributes["replica_groups"] = mesh_axes
        return result

    # On another stream stands nothing but the call: XLA:GPU compiles no kernels for one.
    result = call(operand) if stream is None else beside(inner, [operand], stream, call)
    return convert(ctx, result, carried(wanted), wanted)


def carrier(dtype: np.dtype) -> np.dtype:
    """The type in which `dtype` lies in the engine's buffers: of at least a byte, and able to hold each value of `dtype` exactly."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return np.dtype(jnp.float8_e4m3fn)
    return dtype


def convert(ctx: Any, value: Any, given: Any, wanted: Any) -> Any:
    if given is core.abstract_token or core.physical_aval(given).dtype == core.physical_aval(wanted).dtype:
        return value
    lowering = mlir.lower_fun(lambda x: lax.convert_element_type(x, wanted.dtype), multiple_results=False)
    (result,) = lowering(ctx.replace(primitive=None, avals_in=[given], avals_out=[wanted]), value)
    return result


def without_moving(collective: Collective, ctx: Any, operand: Any, wanted: Any, params: Params) -> Any:
    """The result of an operation that moves no byte: the operand of the only rank, or zeros."""
    if wanted is core.abstract_token:
        return hlo.create_token()
    if collective.one_sided or wanted.size == 0 or not params.get("perm", True):
        return mlir.full_like_aval(ctx, 0, core.physical_aval(wanted))
    return hlo.reshape(mlir.aval_to_ir_type(ctx.module_context, wanted), operand)


def module_name(ctx: Any) -> str:
    return ctx.module_context.module.operation.attributes["sym_name"].value


def _site(collective: Collective, ctx: Any, attributes: Params) -> int:
    """The number of a call in its module. The k-th send and the k-th receive of equal data over equal pairs get one number, below zero."""
    if not collective.one_sided:
        return next(ctx.module_context.channel_iterator)
    numbers, what = _numbers(ctx), _what(attributes)
    count = numbers[collective.kind, what] = numbers.get((collective.kind, what), 0) + 1
    numbers.setdefault(("functions", collective.kind, what), []).append(_function_of(ir.InsertionPoint.current.block.owner))
    _refuse_shared_functions(ctx, numbers, what, count)
    number: int = numbers.setdefault((what, count), -1 - sum(1 for key in numbers if isinstance(key[1], int)))
    return number


def _numbers(ctx: Any) -> dict[Any, Any]:
    """A dictionary that lives as long as the module's lowering, for state of primitives, which ours takes through nested contexts."""
    return ctx.module_context.cached_primitive_lowerings.setdefault(TARGET, {})


def _what(attributes: Params) -> Any:
    """What a send and a receive that meet have in common."""
    return (*(attributes[name].tobytes() for name in ("groups", "pairs", "shape")), attributes["dtype"])


def _refuse_shared_functions(ctx: Any, numbers: dict[Any, Any], what: Any, count: int) -> None:
    """JAX lowers equal functions of a program once, so a psend in a jitted one that is called twice has one number for two messages."""
    earlier = range(1, min(count, *(numbers.get((kind, what), 0) + 1 for kind in ("send", "recv"))))
    functions = {kind: numbers.get(("functions", kind, what), ()) for kind in ("send", "recv")}
    if all(functions["send"][k - 1] == functions["recv"][k - 1] for k in earlier):
        return
    callers: dict[str, list[str]] = {}
    places: dict[tuple[str, int], list[str]] = {}  # the functions that an operation stands in, by kind and site

    def note(operation: ir.Operation) -> ir.WalkResult:
        operation = operation.operation
        if operation.name == "func.call":
            callers.setdefault(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value, []).append(_function_of(operation))
        elif operation.name == "stablehlo.custom_call" and target_of(operation) in (TARGET, START_TARGET):
            options: Any = operation.attributes["mhlo.backend_config"]
            places.setdefault((options["kind"].value, options["site"].value), []).append(_function_of(operation))
        return ir.WalkResult.ADVANCE

    def times(function: str) -> int:  # one that is being lowered has not been called yet
        return max(1, sum(map(times, callers.get(function, ()))))

    *_, here = _ancestors(ir.InsertionPoint.current.block.owner)
    for root in {ctx.module_context.module.operation, here}:
        root.walk(note)
    for k in earlier:
        sent, received = (max(1, sum(map(times, places.get((kind, numbers[what, k]), ())))) for kind in ("send", "recv"))
        if sent != received:
            raise NotImplementedError(
                f"a psend in function {functions['send'][k - 1]!r} (run {sent}x) and its precv in {functions['recv'][k - 1]!r} (run "
                f"{received}x): JAX lowers a jitted or checkpointed function once, so which receive takes which message can't be told; "
                "leave out the jax.jit or jax.checkpoint within the program"
            )


def _ancestors(operation: Any) -> Iterator[Any]:
    """From the innermost on. The last one is the module, or a function that is not in it yet, as a shard_map's body while it is lowered."""
    operation = operation.operation
    while operation is not None:
        yield operation
        operation = operation.parent.operation if operation.attached and operation.parent is not None else None


def _function_of(operation: Any) -> str:
    function = next(one for one in _ancestors(operation) if one.name == "func.func")
    return str(ir.StringAttr(function.attributes["sym_name"]).value)


def sends(ctx: Any) -> list[ir.Value]:
    """The tokens of the module's psends so far; who lowers one adds it."""
    return ctx.module_context.cached_primitive_lowerings.setdefault("psend", [])


def sends_here(ctx: Any) -> list[ir.Value]:
    """Those of them that are in the function which is being lowered."""
    here = ir.InsertionPoint.current.block
    return [token for token in sends(ctx) if (call := operation_of(token)) is not None and call.block == here]


def origin(value: ir.Value) -> ir.Value:
    """The value behind any number of optimization barriers."""
    while (operation := operation_of(value)) is not None and operation.name == "stablehlo.optimization_barrier":
        value = operation.operands[ir.OpResult(value).result_number]
    return value


def operation_of(value: ir.Value) -> ir.Operation | None:
    """What has `value` as a result; None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def target_of(operation: ir.Operation | None) -> str | None:
    """Of a custom call."""
    if operation is None or operation.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(operation.attributes["call_target_name"]).value


def _attributes_behind(token: ir.Value) -> Any:
    """Those of the call of ours that gives the token; None if there is none."""
    call = operation_of(origin(token))
    if call is not None and target_of(call) == DONE_TARGET:  # of a psend_start
        call = operation_of(origin(call.operands[0]))
    return None if call is None or target_of(call) not in (TARGET, START_TARGET) else call.attributes["mhlo.backend_config"]


def check_tokens(name: str, token: Any) -> None:
    """TypeError unless `token` is one, or a pytree of them."""
    leaves = jax.tree.leaves(token)
    wrong = [leaf for leaf in leaves if core.typeof(leaf) is not core.abstract_token]
    if wrong or not leaves:
        got = core.typeof(wrong[0]).str_short() if wrong else repr(token)
        raise TypeError(f"{name}: token must be one that psend, psend_start(...).done() or jax.lax.create_token() gives, got {got}")


def received(tree: Any, axis_name: Any) -> Any:
    """What a precv gives, under check_vma: its type says that ranks have different values, which that of jax.lax leaves out."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    manual = get_abstract_mesh().manual_axes

    def leaf(value: Any) -> Any:
        return core.pvary(value, tuple(name for name in names if name in manual and name not in core.typeof(value).mat.varying))

    return jax.tree.map(leaf, tree)


def check_sender(ctx: Any, token: Any, attributes: Params) -> None:
    """Refuses a receive that would wait in vain: its token is that of a send between the same ranks, but of other data.

    Any token may order a receive, so that alone is no error while a send of the expected data is there to be received.
    """
    numbers, what = _numbers(ctx), _what(attributes)
    if any(numbers[what, k + 1] == attributes["site"] for k in range(numbers.get(("send", what), 0))):
        return
    sent = _attributes_behind(token)
    if sent is None or sent["kind"].value != "send" or any(list(sent[key]) != list(attributes[key]) for key in ("groups", "pairs")):
        return
    given = (sent["dtype"].value, list(sent["shape"]))
    expected = (attributes["dtype"], attributes["shape"].tolist())
    if given != expected:
        between = ", ".join(f"{src}->{dst}" for src, dst in attributes["pairs"].reshape(-1, 2))
        raise ValueError(
            f"precv: out_shape is {expected[0]}{expected[1]}, but the psend of its token sends {given[0]}{given[1]} (ranks {between})"
        )


def device_ids(mesh: Any, groups: Groups) -> np.ndarray:
    """Global device ids of the groups, in an array of shape [groups, ranks]. Connects this process with those that share a group with it.

    Devices of a topology that is only described (ahead-of-time compilation) need no engine. An abstract mesh doesn't say which devices the
    program will run on, so there are no groups: such a lowering can be read, but its compilation fails with a message that says what to do.
    ValueError where it is abstract because a shard_map within another one has inherited it, for which JAX accepts no concrete one instead.
    """
    if not isinstance(mesh, Mesh):
        if mesh.manual_axes:
            raise ValueError(
                f"a hoccl_jax collective in a shard_map within one over {mesh.manual_axes}, whose mesh it inherits: JAX does not tell on "
                "which devices, unless the mesh is the context's too. Call or lower the program under `with jax.set_mesh(mesh):`"
            )
        return np.empty((0, len(groups[0])), np.int64)
    devices = list(mesh.devices.flat)
    if runtime.has_device(devices[0]):
        here = jax.process_index()
        spans = [{devices[partition].process_index for partition in group} for group in groups]
        runtime.ensure_connected(set().union(*(span for span in spans if here in span)))
    return np.array([[devices[partition].id for partition in group] for group in groups], np.int64)


PRIMITIVES.update({collective.twin: _define(collective) for collective in COLLECTIVES})
