"""`reshard`: the data of a global-view program moves from one sharding to another by our collectives.

Along axes of type Auto only XLA's partitioner knows how an array is sharded, so the primitives become custom-partitioned calls: XLA asks
back with the shardings that it has found, and gets a program for one shard. With Explicit axes the same calls do, and the types say more.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import core, dispatch
from jax._src import mesh as mesh_lib
from jax._src.interpreters import ad, batching, mlir
from jax._src.lib.mlir import ir
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hoccl_jax import collectives, primitives, reshard_plan, runtime
from hoccl_jax.config import Config
from hoccl_jax.reshard_plan import Layout, Sizes, Step

Sharding = NamedSharding | PartitionSpec


def reshard(x: Any, sharding_or_spec: Any) -> Any:
    """Gives x the sharding that is asked for: the values are those of x, and so are the gradient's, which goes back to the sharding of x.

    The data moves by the cheapest sequence of all_gather (an axis is dropped), all_to_all (an axis goes to another dimension), ppermute
    (other devices get the blocks) and local slices (an axis is added). For use within jit and outside it, with axes of type Auto, Explicit
    or both; in a dimension that is sharded along both, Explicit ones come first.

    Args:
      x: array, or a pytree of arrays.
      sharding_or_spec: NamedSharding, or PartitionSpec over the mesh of the context (jax.set_mesh) or of x; or a pytree of them with the
        structure of x. Each array's dimensions that the spec doesn't mention are not sharded.

    XLA moves the data, and `hoccl_jax.stats()["fallbacks"]` counts it, where a dimension doesn't divide evenly, where the sharding that
    XLA has found is none along the mesh's axes, and within a shard_map; it also does on platforms without the engine.

    Raises:
      ValueError: no mesh is known; the spec has more entries than x has dimensions, unconstrained or unreduced ones, or unknown axes.
      TypeError: sharding_or_spec is something else.
    """
    if isinstance(sharding_or_spec, NamedSharding | PartitionSpec):
        return jax.tree.map(lambda leaf: _reshard(leaf, sharding_or_spec), x)
    leaves = jax.tree.leaves(sharding_or_spec, is_leaf=_is_sharding)
    if not leaves or not all(isinstance(leaf, NamedSharding | PartitionSpec) for leaf in leaves):
        raise TypeError(f"reshard: sharding_or_spec must be a NamedSharding, a PartitionSpec or a pytree of them, got {sharding_or_spec!r}")
    return jax.tree.map(lambda sharding, leaf: reshard(leaf, sharding), sharding_or_spec, x, is_leaf=_is_sharding)


def _is_sharding(x: Any) -> bool:
    return isinstance(x, jax.sharding.Sharding | PartitionSpec)


def _reshard(x: Any, sharding: Sharding) -> Any:
    aval = core.typeof(x)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else _known_mesh(x)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if len(spec) > aval.ndim:
        raise ValueError(f"reshard: {spec} has more entries than x of shape {aval.shape} has dimensions")
    if PartitionSpec.UNCONSTRAINED in tuple(spec) or spec.unreduced or spec.reduced:
        raise ValueError(f"reshard: {spec} must say for each dimension which axes it is sharded over, and nothing else")
    target = NamedSharding(mesh, PartitionSpec(*spec, *[None] * (aval.ndim - len(spec))))  # raises where an axis is unknown
    if Config.from_env().disable or mesh.size == 1:
        return _by_xla(x, target)
    if mesh.manual_axes or mesh_lib.get_abstract_mesh().manual_axes:
        runtime.count_fallback("reshard", "within a shard_map")
        return _by_xla(x, target)
    if not isinstance(x, core.Tracer):
        if not isinstance(mesh, Mesh):
            raise ValueError(f"reshard: outside jit the sharding needs a mesh of devices, got {mesh}")
        if not isinstance(x, jax.Array) or x.sharding.device_set != target.device_set:
            return jax.device_put(x, target)
        if _only_devices_differ(x, mesh):
            x = _on_devices_of(x, mesh)
    return _move(x, target)


def _by_xla(x: Any, target: NamedSharding) -> Any:
    explicit = _explicit_part(target)
    if explicit is None:
        return lax.with_sharding_constraint(x, target)
    x = jax.sharding.reshard(x, NamedSharding(target.mesh, explicit))
    return x if explicit == target.spec else lax.with_sharding_constraint(x, target)


def _explicit_part(target: NamedSharding) -> PartitionSpec | None:
    """What the type of an array sharded so says of it; None over a mesh without Explicit axes."""
    explicit = {name for name, kind in zip(target.mesh.axis_names, target.mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return None
    entries: list[Any] = []
    for entry in target.spec:
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        typed = tuple(axis for axis in axes if axis in explicit)
        if typed != axes[: len(typed)]:
            raise ValueError(f"reshard: in each dimension Explicit axes must come before others, got {target.spec}")
        entries.append(entry if typed == axes else typed or None)
    return PartitionSpec(*entries)


def _known_mesh(x: Any) -> Any:
    """The mesh of the context, else that of x."""
    for mesh in (mesh_lib.get_concrete_mesh(), mesh_lib.get_abstract_mesh(), mesh_lib.thread_resources.env.physical_mesh):
        if not mesh.empty:
            return mesh
    for known in (getattr(x, "sharding", None), core.typeof(x).sharding):
        if isinstance(known, NamedSharding) and not known.mesh.empty:
            return known.mesh
    raise ValueError("reshard: a PartitionSpec needs a mesh: give a NamedSharding, or make the mesh the context's with jax.set_mesh")


def _sizes(mesh: Any) -> Sizes:
    return tuple((name, size) for name, size in mesh.shape.items() if size > 1)


def _layout(sharding: NamedSharding, ndim: int | None = None) -> Layout:
    entries = tuple(sharding.spec)
    axes = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]
    axes += [()] * ((ndim or len(axes)) - len(axes))
    return tuple(tuple(axis for axis in each if sharding.mesh.shape[axis] > 1) for each in axes)


# The primitives. `move_p` reshards its operand. `like_p` does the same to a tangent and, with `back`, brings a cotangent to the sharding of
# `like`, which is the value that was resharded: along Auto axes nothing else tells, and what XLA compiles never looks at its data.

move_p = Primitive("hoccl_reshard")
like_p = Primitive("hoccl_reshard_like")


def _move(x: Any, target: NamedSharding) -> Any:
    if jax.dtypes.issubdtype(core.typeof(x).dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_move(jax.random.key_data(x), target), impl=jax.random.key_impl(x))
    moved = move_p.bind(x, target=target)
    if {AxisType.Auto, AxisType.Explicit} <= set(target.mesh.axis_types) or not isinstance(target.mesh, Mesh):
        return moved
    return _by_xla(moved, target)  # which has nothing left to do, but tells jit the devices


def _is_typed(aval: Any) -> bool:
    """Does the type of a value say how it is sharded along each axis of its mesh?"""
    mesh = aval.sharding.mesh
    return not mesh.empty and mesh.are_all_axes_explicit


def _moved_type(aval: Any, target: NamedSharding) -> Any:
    mesh, given, explicit = target.mesh.abstract_mesh, aval.sharding.mesh, _explicit_part(target)
    if not given.empty and given != mesh and (explicit is not None or AxisType.Explicit in given.axis_types):
        raise ValueError(f"reshard: x has a type over {given}, the sharding is over {mesh}")
    return aval if explicit is None else aval.update(sharding=NamedSharding(mesh, explicit))


move_p.def_impl(partial(dispatch.apply_primitive, move_p))
move_p.def_abstract_eval(lambda x, *, target: _moved_type(x, target))
like_p.def_impl(partial(dispatch.apply_primitive, like_p))
like_p.def_abstract_eval(lambda x, like, *, target, back: x.update(sharding=like.sharding) if back else _moved_type(x, target))


def _move_jvp(primals: Any, tangents: Any, *, target: NamedSharding) -> Any:
    (x,), (tangent,) = primals, tangents
    moved = move_p.bind(x, target=target)
    if type(tangent) is ad.Zero:
        return moved, ad.Zero(core.typeof(moved).to_tangent_aval())
    if _is_typed(core.typeof(x)):
        return moved, move_p.bind(tangent, target=target)
    return moved, like_p.bind(tangent, x, target=target, back=False)


def _move_transpose(cotangent: Any, x: Any, *, target: NamedSharding) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    source = x.aval.sharding if _is_typed(x.aval) else target
    return [move_p.bind(cotangent, target=NamedSharding(target.mesh, source.spec))]


def _like_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    moved = like_p.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return moved, ad.Zero(core.typeof(moved).to_tangent_aval())
    return moved, like_p.bind(tangents[0], primals[1], **params)


def _like_transpose(cotangent: Any, x: Any, like: Any, *, target: NamedSharding, back: bool) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval), None]
    return [like_p.bind(cotangent, like, target=target, back=not back), None]


def _batched(target: NamedSharding, axis: Any, dim: int) -> NamedSharding:
    """The target of an array with a further dimension at `dim`."""
    entries = list(target.spec)
    names = axis.explicit_mesh_axis if axis.explicit_mesh_axis is not None else axis.spmd_name
    entries.insert(dim, names)
    return NamedSharding(target.mesh, PartitionSpec(*entries))


def _move_batch(axis: Any, operands: Any, dims: Any, *, target: NamedSharding) -> Any:
    (x,), (dim,) = operands, dims
    return move_p.bind(x, target=target if dim is None else _batched(target, axis, dim)), dim


def _like_batch(axis: Any, operands: Any, dims: Any, *, target: NamedSharding, back: bool) -> Any:
    if all(dim is None for dim in dims):
        return like_p.bind(*operands, target=target, back=back), None
    x, like = [batching.bdim_at_front(operand, dim, axis.size) for operand, dim in zip(operands, dims, strict=True)]
    return like_p.bind(x, like, target=_batched(target, axis, 0), back=back), 0


ad.primitive_jvps[move_p] = _move_jvp
ad.primitive_transposes[move_p] = _move_transpose
ad.primitive_jvps[like_p] = _like_jvp
ad.primitive_transposes[like_p] = _like_transpose
batching.fancy_primitive_batchers[move_p] = _move_batch
batching.fancy_primitive_batchers[like_p] = _like_batch


# Lowering


def _lower(ctx: Any, *operands: Any, target: NamedSharding, back: bool = False) -> Any:
    """Emits the custom-partitioned call and, but for `back`, the constraint that its result is sharded like `target`."""
    (result,) = ctx.avals_out
    devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
    value, operands = operands[0], operands if back else operands[:1]
    if devices is not None and len(devices) == target.mesh.size > 1:
        mesh = Mesh(np.array(devices).reshape(target.mesh.axis_sizes), target.mesh.axis_names)
        call = _partitioned(mesh, target.spec, result.ndim, back, primitives.module_name(ctx))
        inner = ctx.replace(avals_in=ctx.avals_in[: len(operands)])
        (value,) = mlir.lower_fun(call, multiple_results=False)(inner, *operands)
    return [value] if back else _constrain(ctx, value, target=target)


def _constrain(ctx: Any, value: Any, *_: Any, target: NamedSharding, back: bool = False) -> Any:
    (result,) = ctx.avals_out
    if back:
        return [mlir.lower_with_sharding_in_types(ctx, value, result)]
    if jax.config.jax_use_shardy_partitioner:
        wanted: Any = target._to_sdy_sharding(result.ndim)
    else:
        wanted = target._to_xla_hlo_sharding(result.ndim).to_proto()
    return [mlir.wrap_with_sharding_op(ctx, value, result, wanted)]


def _partitioned(mesh: Mesh, spec: PartitionSpec, ndim: int, back: bool, module: str) -> Any:
    """The call that XLA's partitioner asks for its program. Its result and its operand share no factor of the sharding rule, so nothing is
    propagated across; with `back` the result is sharded like the second operand."""
    target = NamedSharding(mesh, spec)

    def replicated(info: Any) -> Any:
        return info.sharding if info.sharding is not None else NamedSharding(mesh, PartitionSpec())

    def partition(_mesh: Any, operands: Any, result: Any) -> Any:
        given = tuple(map(replicated, operands))
        wanted = replicated(result)
        steps = _plan(mesh, operands[0], given[0], wanted)
        if isinstance(steps, str):
            runtime.count_fallback("reshard", steps)
            return mesh, lambda x, *like: x, wanted, (wanted, *given[1:])
        return mesh, lambda x, *like: steps_p.bind(x, steps=steps, sizes=_sizes(mesh), module=module), wanted, given

    def infer(_mesh: Any, operands: Any, result: Any) -> Any:
        return replicated(operands[1]) if back else target

    names = [f"{letter}{dim}" for letter in "xy" for dim in range(ndim)]
    moved, other = " ".join(names[:ndim]), " ".join(names[ndim:])
    call = custom_partitioning(lambda x, like: x) if back else custom_partitioning(lambda x: x)
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        propagate_user_sharding=lambda _mesh, user: user.sharding,
        decode_shardings=False,
        sharding_rule=f"{moved}, {other} -> {other}" if back else f"{moved} -> {other}",
    )
    return call


def _plan(mesh: Mesh, operand: Any, given: Any, wanted: Any) -> tuple[Step, ...] | str:
    """The steps from one sharding to the other, or why XLA must do it."""
    layouts = []
    for sharding in (given, wanted):
        try:
            spec = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(operand.ndim), mesh)[0]
        except (ValueError, NotImplementedError, AssertionError, StopIteration, KeyError):
            return f"{sharding} is no sharding along the axes of {mesh}"
        layout = _layout(NamedSharding(mesh, spec), operand.ndim)
        if not reshard_plan.fits(operand.shape, layout, _sizes(mesh)):
            return f"shape {operand.shape} does not divide evenly by {spec}"
        layouts.append(layout)
    steps = reshard_plan.plan(tuple(operand.shape), operand.dtype.itemsize, _sizes(mesh), *layouts)
    return steps if steps is not None else f"no short way from {layouts[0]} to {layouts[1]}"


def _run(steps: tuple[Step, ...], x: Any, sizes: Sizes) -> Any:
    """The steps, on one shard."""
    for step in steps:
        if step.kind == "slice":
            (axis,) = step.axes
            size = x.shape[step.dim] // lax.axis_size(axis)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, step.dim)
        elif step.kind == "all_gather":
            x = collectives.all_gather(x, step.axes, axis=step.dim, tiled=True)
        elif step.kind == "all_to_all":
            x = collectives.all_to_all(x, step.axes, step.to_dim, step.dim, tiled=True)
        else:
            x = collectives.ppermute(x, tuple(name for name, _ in sizes), step.pairs)
    return x


steps_p = Primitive("hoccl_reshard_steps")
"""The steps as one primitive. XLA asks for them while the context's mesh is still that of the whole program. Operations on one shard must
not be traced with its types, so they are traced as late as at this primitive's lowering, in a context without a mesh."""


@steps_p.def_abstract_eval
def _shard_after(x: Any, *, steps: tuple[Step, ...], sizes: Sizes, module: str) -> Any:
    return core.ShapedArray(reshard_plan.shard_after(x.shape, steps, sizes), x.dtype)


def _lower_steps(ctx: Any, x: Any, *, steps: tuple[Step, ...], sizes: Sizes, module: str) -> Any:
    # Part of the identity of call sites, which are counted until the compilation of the module of this name ends.
    ctx.module_context.module.operation.attributes["sym_name"] = ir.StringAttr.get(module)
    with mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh):
        plain = [[core.ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
        inner = ctx.replace(avals_in=plain[0], avals_out=plain[1])
        return mlir.lower_fun(lambda x: _run(steps, x, sizes), multiple_results=False)(inner, x)


mlir.register_lowering(steps_p, _lower_steps, cacheable=False)


for _primitive in (move_p, like_p):
    dispatch.prim_requires_devices_during_lowering.add(_primitive)
    mlir.register_lowering(_primitive, _constrain)
    for _platform in primitives.PLATFORMS:
        mlir.register_lowering(_primitive, _lower, platform=_platform, cacheable=False)


# One array, other devices


def _only_devices_differ(x: jax.Array, mesh: Mesh) -> bool:
    """Does x lie on the devices of `mesh`, in another order of the same axes?"""
    if not isinstance(x.sharding, NamedSharding) or x.sharding.mesh.shape != mesh.shape:
        return False
    devices, others = list(x.sharding.mesh.devices.flat), list(mesh.devices.flat)
    return devices != others and set(devices) == set(others)


def _on_devices_of(x: jax.Array, mesh: Mesh) -> jax.Array:
    """x with the same layout over `mesh`, which has the same axes and devices as its own, in another order."""
    assert isinstance(x.sharding, NamedSharding)
    if x.ndim == 0:
        return jax.device_put(x, NamedSharding(mesh, x.sharding.spec))  # every device has it
    rank = {device: rank for rank, device in enumerate(mesh.devices.flat)}
    wants = reshard_plan.blocks(_layout(x.sharding, x.ndim), tuple(mesh.shape.items()))
    has = np.empty_like(wants)
    has[[rank[device] for device in x.sharding.mesh.devices.flat]] = wants
    pairs = reshard_plan.matched(has, wants)
    # The shards stay where they are and become those of an array of all blocks along dimension 0; so do they on the way back.
    line = Mesh(mesh.devices.reshape(-1), "rank")
    shards = [shard.data for shard in x.addressable_shards]
    shape = (mesh.size * shards[0].shape[0], *shards[0].shape[1:])
    blocks = jax.make_array_from_single_device_arrays(shape, NamedSharding(line, PartitionSpec("rank")), shards)
    moved = _permuted(line, pairs)(blocks)
    shards = [shard.data for shard in moved.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), shards)


@functools.lru_cache(maxsize=256)
def _permuted(line: Mesh, pairs: tuple[tuple[int, int], ...]) -> Any:
    body = partial(collectives.ppermute, axis_name="rank", perm=pairs)
    return jax.jit(jax.shard_map(body, mesh=line, in_specs=PartitionSpec("rank"), out_specs=PartitionSpec("rank")))
