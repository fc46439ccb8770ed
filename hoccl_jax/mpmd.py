"""`send` and `recv` between programs: what one jitted program sends, another one receives, on another device, in this process or another.

A message is known by its source, destination and tag; those with the same three are received in the order in which they were sent. JAX's
ordered effects keep that order within a program and from one program of a device to the next, for each of the three apart. A receive also
comes after the sends before it in its program, and no send need wait for a receive before it: programs that are free of deadlock as they
are written run free of it. jax.lax has nothing like them, so HOCCL_DISABLE leaves them alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax._src import core, dispatch, effects
from jax._src import mesh as mesh_lib
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive
from jax.sharding import Mesh

from hoccl_jax import primitives, runtime
from hoccl_jax.collectives import Priority, checked_options

Peer: TypeAlias = jax.Device | int
_MODULE = "send/recv"  # in the place of a program's name


@dataclasses.dataclass(frozen=True)
class Ordered(effects.Effect):
    """Of messages with the same direction, peers and tag in programs of one device."""

    kind: str
    peers: tuple[int, ...]
    tag: int
    device: int | None = None  # in whose program; nobody knows it before the program is dispatched

    def __str__(self) -> str:
        return f"{self.kind} with {self.peers}, tag {self.tag}"


class Unordered(effects.Effect):
    """Of messages in programs of several devices, where JAX has no ordered effects."""

    def __str__(self) -> str:
        return "messages to other programs"


def _keep_order_by_device() -> None:
    """JAX has one token of an ordered effect for all devices, and moves it: a program that receives would, when it is dispatched, wait for
    another device's program to have received from the same source with the same tag. Messages get a token for each device."""
    original: Any = dispatch.RuntimeTokenSet
    get_token_input, set_token_result = original.get_token_input, original.set_token_result

    def get(self: Any, effect: effects.Effect, devices: list[jax.Device]) -> Any:
        if isinstance(effect, Ordered):
            effect = dataclasses.replace(effect, device=devices[0].id)
        return get_token_input(self, effect, devices)

    def set_result(self: Any, effect: effects.Effect, token: Any) -> None:
        if isinstance(effect, Ordered):
            (device,) = token._buf.sharding.device_set
            effect = dataclasses.replace(effect, device=device.id)
        set_token_result(self, effect, token)

    original.get_token_input, original.set_token_result = get, set_result


_keep_order_by_device()
_unordered = Unordered()
effects.ordered_effects.add_type(Ordered)
effects.control_flow_allowed_effects.add_type(Ordered)
for _effect in (Ordered, Unordered):
    effects.lowerable_effects.add_type(_effect)


def send(x: Any, dst: Peer | Sequence[Peer], *, tag: int = 0, priority: Priority = "foreground") -> None:
    """Sends x to a program on another device, which takes it with `recv`.

    The send is over when x has been copied; it does not wait for the receive, so two programs may both send first. On GPUs the copy is in
    memory beside XLA's pool (XLA_PYTHON_CLIENT_MEM_FRACTION leaves it room) until it is received.

    Args:
      x: array, or a pytree of arrays, each of which is a message.
      dst: destination, a jax.Device or its id. Inside a shard_map over all axes of a mesh: a sequence of them, one for each device of the
        mesh in its order. Such a program has several devices, and JAX keeps no order there: messages of one program between the same
        devices need different tags, and control flow must not hold them. On CPU devices XLA runs the programs of several devices of one
        process one after the other, so those that wait for each other must be in several processes.
      tag: integer from 0 to 2**62 that tells messages between the same two devices apart.
      priority: see hoccl_jax.collectives.

    Has no vmap and no differentiation.

    Raises:
      ValueError: dst or tag are not as above, a device would send to itself, or is source and destination in one call.
      TimeoutError: dst's process did not start the engine (hoccl_jax.init) within HOCCL_TIMEOUT_S.
    """
    peers, options = _checked(dst, "dst", tag), checked_options(priority, False)
    for leaf in jax.tree.leaves(x):
        send_p.bind(leaf, peers=peers, tag=tag, effect=_effect_of("send", peers, tag), priority=options.priority)


def recv(shape_dtype: Any, src: Peer | Sequence[Peer], *, tag: int = 0, priority: Priority = "foreground") -> Any:
    """Receives what a program on another device sends to this one with `send`.

    Args:
      shape_dtype: what to receive, a jax.ShapeDtypeStruct or anything else with shape and dtype, or a pytree of them.
      src: source, as dst of `send`.
      tag: of the message.
      priority: see hoccl_jax.collectives.

    Returns the message.

    Raises:
      ValueError, TimeoutError: as `send`; jax.errors.JaxRuntimeError when it runs, on both sides, if the message has another shape or type,
        if none comes within HOCCL_TIMEOUT_S, or if the source's process has died. JAX then lets later messages of the same source,
        destination and tag fail as well. On GPUs, the next operation raises it, or `hoccl_jax.check_errors`.
    """
    peers, options = _checked(src, "src", tag), checked_options(priority, False)
    manual = tuple(mesh_lib.get_abstract_mesh().manual_axes)

    def one(wanted: Any) -> Any:
        aval = core.ShapedArray(tuple(wanted.shape), jax.dtypes.canonicalize_dtype(wanted.dtype, allow_extended_dtype=True))
        received = recv_p.bind(peers=peers, tag=tag, effect=_effect_of("recv", peers, tag), priority=options.priority, aval=aval)
        return core.pvary(received, tuple(axis for axis in manual if axis not in core.typeof(received).mat.varying))

    return jax.tree.map(one, shape_dtype)


def _checked(peers: Any, name: str, tag: Any) -> tuple[int, ...]:
    listed = [peers] if isinstance(peers, int | np.integer | jax.Device) else peers
    if not isinstance(listed, Sequence | np.ndarray) or not all(isinstance(peer, int | np.integer | jax.Device) for peer in listed):
        raise ValueError(f"{name} must be a jax.Device, the id of one, or a sequence of them, got {peers!r}")
    if not isinstance(tag, int | np.integer) or isinstance(tag, bool) or not 0 <= tag <= 1 << 62:
        raise ValueError(f"tag must be an integer from 0 to 2**62, got {tag!r}")
    return tuple(peer.id if isinstance(peer, jax.Device) else int(peer) for peer in listed)


def _effect_of(kind: str, peers: tuple[int, ...], tag: int) -> effects.Effect:
    return _unordered if mesh_lib.get_abstract_mesh().manual_axes else Ordered(kind, peers, int(tag))


send_p = Primitive("hoccl_send")
send_p.multiple_results = True
send_p.def_impl(partial(dispatch.apply_primitive, send_p))
send_p.def_effectful_abstract_eval(lambda x, *, effect, **_: ([], {effect}))
recv_p = Primitive("hoccl_recv")
recv_p.def_impl(partial(dispatch.apply_primitive, recv_p))
recv_p.def_effectful_abstract_eval(lambda *, aval, effect, **_: (aval, {effect}))


def _lower(kind: str, ctx: Any, *operands: Any, peers: tuple[int, ...], tag: int, effect: Any, priority: str, aval: Any = None) -> Any:
    runtime.register_targets()
    aval = ctx.avals_in[0] if kind == "send" else aval
    physical = core.physical_aval(aval)
    own = _devices(ctx)
    if len(own) != len(peers):
        raise ValueError(f"{kind} in a program of {len(own)} devices, {own}, needs as many peers, got {peers}")
    pairs = list(zip(own, peers, strict=True) if kind == "send" else zip(peers, own, strict=True))
    if len({*own, *peers}) != 2 * len(own):
        raise ValueError(f"{kind} from {[src for src, _ in pairs]} to {[dst for _, dst in pairs]}: a device occurs twice")
    ordered = isinstance(effect, Ordered)
    # A receive comes after all sends before it, or a runtime that does one thing after the other might wait in it with them undone.
    if ordered:
        sends = [ctx.tokens_in.get(each) for each in ctx.tokens_in.effects() if isinstance(each, Ordered) and each.kind == "send"]
    else:
        sends = _sends_before(kind, ctx, peers, tag)
    runtime.ensure_connected(_processes(peers))
    attributes = {
        "kind": kind,
        "module": _MODULE,
        "site": int(tag),
        "tagged": 1,
        "groups": np.array(pairs, np.int64).reshape(-1),
        "group_size": 2,
        "dtype": str(aval.dtype),
        "itemsize": primitives.carrier(physical.dtype).itemsize,
        "shape": np.array(physical.shape, np.int64),
        "split_axis": -1,
        "concat_axis": -1,
        "pairs": np.array([0, 1], np.int64),
        "priority": primitives.PRIORITIES[priority],
    }
    token = ctx.tokens_in.get(effect) if ordered else hlo.create_token()
    if kind == "recv" and sends:
        token = hlo.after_all([token, *sends])
    carried = physical.update(dtype=primitives.carrier(physical.dtype))
    lowering = jax.ffi.ffi_lowering(primitives.TARGET, has_side_effect=True)
    if kind == "send":
        value = primitives.convert(ctx, operands[0], aval, carried)
        inner = ctx.replace(avals_in=[carried, core.abstract_token], avals_out=[core.abstract_token])
        (token,) = lowering(inner, value, token, **attributes)
        results = []
    else:
        more = _work(ctx)
        inner = ctx.replace(avals_in=[core.abstract_token, *(aval for aval, _ in more)], avals_out=[carried, core.abstract_token])
        value, token = lowering(inner, token, *(value for _, value in more), **attributes)
        results = [primitives.convert(ctx, value, carried, aval)]
    if ordered:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    elif kind == "send":
        sends.append(token)
    return results


def _sends_before(kind: str, ctx: Any, peers: tuple[int, ...], tag: int) -> list[Any]:
    """The tokens of the sends that a program of several devices has so far; the caller adds its own."""
    known, sends = ctx.module_context.cached_primitive_lowerings.setdefault(_MODULE, (set(), []))
    if (kind, peers, tag) in known:
        raise ValueError(f"two {kind}s with {peers} and tag {tag} in a program of several devices, which keeps no order: use two tags")
    known.add((kind, peers, tag))
    block = ir.InsertionPoint.current.block
    if any(token.owner.operation.block != block for token in sends):
        raise NotImplementedError("send and recv of a program of several devices must stand in one function, not in a jit within it")
    return sends


def _work(ctx: Any) -> list[tuple[Any, Any]]:
    """Operands for a receive on CPU devices, to no other purpose than that the program has some arithmetic. XLA:CPU runs programs of less
    than 1000 operations in the thread that starts them. It would wait in the receive, and could not start the program that sends."""
    if tuple(ctx.module_context.platforms) != ("cpu",):
        return []
    number = core.ShapedArray((), np.dtype(np.float32))
    inner = ctx.replace(primitive=None, avals_in=[], avals_out=[number])
    (value,) = mlir.lower_fun(lambda: lax.reduce_max(lax.iota(np.float32, 4096) * 0.5, (0,)), multiple_results=False)(inner)
    return [(number, value)]


def _devices(ctx: Any) -> list[int]:
    """Of the program, in the order of its mesh."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, Mesh):
        if set(context.manual_axes) != set(mesh.axis_names):
            raise NotImplementedError(f"send and recv need a shard_map over all axes of the mesh, got {context.manual_axes} of {mesh}")
        return [device.id for device in mesh.devices.flat]
    devices = getattr(context, "device_assignment", None)
    if devices is None:
        raise ValueError("send and recv must know the devices of their program: use a mesh of devices, and no jax.export")
    return [device.id for device in devices]


def _processes(peers: Sequence[int]) -> set[int]:
    process_of = {device.id: device.process_index for platform in primitives.PLATFORMS for device in runtime.devices(platform)}
    unknown = [peer for peer in peers if peer not in process_of]
    if unknown:
        raise ValueError(f"send and recv: {unknown} are ids of no devices, there are {sorted(process_of)}")
    return {process_of[peer] for peer in peers}


for _primitive, _kind in ((send_p, "send"), (recv_p, "recv")):
    dispatch.prim_requires_devices_during_lowering.add(_primitive)
    for _platform in primitives.PLATFORMS:
        mlir.register_lowering(_primitive, partial(_lower, _kind), platform=_platform, cacheable=False)
