"""Random cases in which hoccl_jax must equal jax.lax bit for bit.

`generate` makes them for any number of devices, alike in every process of a job; `check` runs one on given devices and compares the shards
that this process holds. One program computes both sides, so each case also mixes our collectives with XLA's; without jit there are two.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax

OPERATIONS = ("all_gather", "all_to_all", "ppermute", "pshuffle", "pbroadcast", "send_recv", "exchange", "ragged_all_to_all")
NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
# XLA:CPU itself can't hold the other types of jax: int1, uint1, float6_*.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "key<fry>", *NARROW),
)
BATCH = 3  # size of a vmapped or scanned dimension
NAMED = ("v", 4)  # name and size of a vmapped dimension with a name

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """`shape`: of one rank's operand. `mesh`: names and sizes. `input_axes`: the axes that the operand differs over."""

    number: int
    operation: str
    transform: str
    dtype: str
    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    input_axes: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...]
    priority: str
    overlap: bool
    check_vma: bool

    @property
    def options(self) -> dict[str, Any]:
        """What jax.lax's functions have not. Messages, which wait for nobody, can't overlap anything either."""
        return {"priority": self.priority} | ({} if self.operation == "send_recv" else {"overlap": self.overlap})

    def __str__(self) -> str:
        mesh = ",".join(f"{name}{size}" for name, size in self.mesh)
        return f"{self.number:03}-{self.operation}-{self.transform}-{self.dtype}{list(self.shape)}-{mesh}".replace(" ", "")


def generate(device_count: int, seed: int, count: int) -> Iterator[Case]:
    """`count` cases for meshes of `device_count` devices: all transformations of all operations in turn, everything else at random."""
    rng = random.Random(f"{device_count} {seed}")
    pairs = [(operation, transform) for transform in TRANSFORMS for operation in OPERATIONS if _applies(transform, operation)]
    for number in range(count):
        # Every other case goes through the types, plainly jitted.
        if number % 2:
            yield _case(rng, number, rng.choice(OPERATIONS), "jit", DTYPES[number // 2 % len(DTYPES)], device_count)
        else:
            operation, transform = pairs[number // 2 % len(pairs)]
            dtypes = ("float32", "bfloat16", "float64", "complex64") if transform in DIFFERENTIATED else ("float32", "int32", "uint8")
            yield _case(rng, number, operation, transform, rng.choice(dtypes), device_count)


def check(case: Case, devices: Sequence[jax.Device]) -> None:
    """Runs the case on these devices (as many as it was generated for, of all processes) and raises AssertionError at a difference."""
    order = np.random.default_rng(case.number).permutation(len(devices))
    mesh = Mesh(np.array(devices)[order].reshape([size for _, size in case.mesh]), tuple(name for name, _ in case.mesh))
    with jax.enable_x64("64" in case.dtype or "128" in case.dtype), _any_axis_order():
        (results,) = _run(case, mesh)
        ours, theirs = map(jax.tree.leaves, results)
    assert len(ours) == len(theirs) > 0
    for our, their in zip(ours, theirs, strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        for a, b in zip(our.addressable_shards, their.addressable_shards, strict=True):
            assert a.device == b.device
            np.testing.assert_array_equal(_bits(a.data), _bits(b.data), err_msg=f"on {a.device}: ours, jax.lax's")


def check_across(case: Case, devices: Sequence[jax.Device], reference: Sequence[jax.Device]) -> None:
    """As `check`, with our side on `devices` of all processes, and jax.lax's on as many devices of this process.

    Ours runs several times, since calls that come again may be enqueued otherwise than those that come first.
    """
    order = np.random.default_rng(case.number).permutation(len(devices))
    sides = []
    with jax.enable_x64("64" in case.dtype or "128" in case.dtype), _any_axis_order():
        for library, them, times in ((Hoccl, devices, 3), (Lax, reference, 1)):
            mesh = Mesh(np.array(them)[order].reshape([size for _, size in case.mesh]), tuple(name for name, _ in case.mesh))
            runs = _run(case, mesh, libraries=(library,), times=times)
            sides.append((list(mesh.devices.flat), [jax.tree.leaves(results) for results in runs]))
    (our_devices, our_runs), (their_devices, (theirs,)) = sides
    for ours in our_runs:
        assert len(ours) == len(theirs) > 0
        for our, their in zip(ours, theirs, strict=True):
            assert (our.shape, our.dtype) == (their.shape, their.dtype)
            wanted = {their_devices.index(shard.device): _bits(shard.data) for shard in their.addressable_shards}
            for shard in our.addressable_shards:
                np.testing.assert_array_equal(_bits(shard.data), wanted[our_devices.index(shard.device)], err_msg=f"on {shard.device}")


# What runs


class Lax:
    """The operations with jax.lax, where XLA:CPU lacks one by another of the same meaning."""

    @staticmethod
    def _carried(function: Function, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Narrow types travel widened and keys as their data: XLA:CPU can't compile all collectives of them."""

        def leaf(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(function(jax.random.key_data(x), *args, **kwargs))
            if x.dtype.name in NARROW:
                return function(x.astype("float32" if x.dtype.name.startswith("float") else "int8"), *args, **kwargs).astype(x.dtype)
            return function(x, *args, **kwargs)

        return jax.tree.map(leaf, x)

    @classmethod
    def all_gather(cls, x: Any, **kwargs: Any) -> Any:
        return cls._carried(lax.all_gather, x, **kwargs)

    @classmethod
    def all_to_all(cls, x: Any, **kwargs: Any) -> Any:
        return cls._carried(lax.all_to_all, x, **kwargs)

    @classmethod
    def ppermute(cls, x: Any, **kwargs: Any) -> Any:
        return cls._carried(lax.ppermute, x, **kwargs)

    @classmethod
    def pshuffle(cls, x: Any, **kwargs: Any) -> Any:
        return cls._carried(lax.pshuffle, x, **kwargs)

    @classmethod
    def pbroadcast(cls, x: Any, *, source: int, **kwargs: Any) -> Any:
        return cls._carried(lambda x: lax.all_gather(x, **kwargs)[source], x)

    send_recv = ppermute

    @classmethod
    def exchange(cls, x: Any, *, axis_name: Any, flows: Sequence[hoccl_jax.Flow], rows: int) -> Any:
        source = np.full((lax.axis_size(axis_name), rows), -1)  # of each row, among those of all ranks

        def leaf(x: Any) -> Any:
            for src, dst, src_row, dst_row, count in flows:
                source[dst, dst_row : dst_row + count] = src * x.shape[0] + src_row + np.arange(count)
            own = jnp.asarray(source)[lax.axis_index(axis_name)]
            if not flows:
                return jnp.zeros_like(x, shape=(rows, *x.shape[1:]))
            everything = lax.all_gather(x, axis_name).reshape(source.shape[0] * x.shape[0], *x.shape[1:])
            taken = jnp.take(everything, jnp.maximum(own, 0), axis=0)
            return jnp.where(own.reshape(-1, *[1] * (x.ndim - 1)) >= 0, taken, jnp.zeros_like(taken))

        return cls._carried(leaf, x)

    ragged_all_to_all = exchange  # what differs is when the flows are known


class Hoccl:
    """The operations under test."""

    all_gather = staticmethod(hoccl_jax.all_gather)
    all_to_all = staticmethod(hoccl_jax.all_to_all)
    ppermute = staticmethod(hoccl_jax.ppermute)
    pshuffle = staticmethod(hoccl_jax.pshuffle)
    pbroadcast = staticmethod(hoccl_jax.pbroadcast)

    @staticmethod
    def send_recv(x: Any, **kwargs: Any) -> Any:
        def leaf(x: jax.Array) -> jax.Array:
            token = hoccl_jax.psend(x, **kwargs)
            return hoccl_jax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), **kwargs)

        return jax.tree.map(leaf, x)

    @staticmethod
    def exchange(x: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda x: hoccl_jax.exchange(x, **kwargs), x)

    @staticmethod
    def ragged_all_to_all(x: Any, *, axis_name: Any, flows: Sequence[hoccl_jax.Flow], rows: int, **kwargs: Any) -> Any:
        ranks = lax.axis_size(axis_name)
        slices = max([1, *collections.Counter((flow.src, flow.dst) for flow in flows).values()])
        table = np.zeros((4, ranks, ranks, slices), np.int32)  # number, owner, other, slice
        used: collections.Counter[tuple[int, int]] = collections.Counter()
        for src, dst, src_row, dst_row, count in flows:
            slice_ = used[src, dst]
            used[src, dst] += 1
            table[:3, src, dst, slice_] = src_row, count, dst_row
            table[3, dst, src, slice_] = count
        numbers = jnp.asarray(table.reshape(4, ranks, -1))[:, lax.axis_index(axis_name)]

        def leaf(x: Any) -> Any:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(leaf(jax.random.key_data(x)))
            output = jnp.zeros_like(x, shape=(rows, *x.shape[1:]))
            return hoccl_jax.ragged_all_to_all(x, output, *numbers, axis_name=axis_name, **kwargs)

        return jax.tree.map(leaf, x)


def _run(case: Case, mesh: Mesh, libraries: Sequence[type] | None = None, times: int = 1) -> list[Any]:
    """What each run of one program gives: a tuple with the results of each library."""
    if case.transform == "eager" and libraries is None:
        # Ours alone: of jax.lax's side each little operation would be compiled by itself.
        jitted = dataclasses.replace(case, transform="jit")
        return [(*ours, *theirs) for ours, theirs in zip(_run(case, mesh, (Hoccl,), times), _run(jitted, mesh, (Lax,), times), strict=True)]
    transform = TRANSFORMS[case.transform]

    def one_side(library: type, **more: Any) -> Function:
        return transform(lambda x: getattr(library, case.operation)(x, **dict(case.arguments), **more))

    sides = [one_side(library, **(case.options if library is Hoccl else {})) for library in libraries or (Hoccl, Lax)]

    def body(x: jax.Array, count: jax.Array) -> Any:
        x = x[0]
        if case.dtype == "key<fry>":
            x = jax.random.wrap_key_data(x)
        results = tuple(side(x, count) for side in sides)
        if case.dtype == "key<fry>":
            results = jax.tree.map(jax.random.key_data, results)
        return jax.tree.map(lambda y: y[None], results)

    inputs = [_inputs(case, mesh) for _ in range(times)]  # each run's own, which it may be given for good
    in_context = case.transform == "context_mesh"
    program = jax.shard_map(
        body, mesh=None if in_context else mesh, in_specs=(P(case.input_axes), P()), out_specs=P(mesh.axis_names), check_vma=case.check_vma
    )
    under_jit = jax.jit(program, donate_argnums=(0,) if case.transform == "donate" else ())
    run: Callable[..., Any] = program if case.transform == "eager" else under_jit
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        if case.transform == "aot":
            run = under_jit.lower(*inputs[0]).compile()
        return [jax.block_until_ready(run(x, count)) for x, count in inputs]


def _plain(function: Function) -> Function:
    return lambda x, count: function(x)


def _scan(function: Function) -> Function:
    return lambda x, count: lax.scan(lambda carry, x: (carry, function(x)), None, jnp.stack([x, x + x, x]))[1]


def _while(function: Function) -> Function:
    """Twice around the loop; each round's operand depends on the round."""
    return lambda x, count: lax.while_loop(
        lambda state: state[0] < count,
        lambda state: (state[0] + 1, function(x + (x * 0 + state[0].astype(x.dtype)))),
        (0 * count, function(x)),
    )[1]


def _cond(function: Function) -> Function:
    return lambda x, count: lax.cond(count > 1, function, lambda x: function(x + x), x)


def _remat(function: Function) -> Function:
    return _vjp(jax.checkpoint(lambda x: function(x * x)))


def _vjp(function: Function) -> Function:
    def transformed(x: jax.Array, count: jax.Array) -> Any:
        result, pullback = jax.vjp(function, x)
        return result, pullback(result + result)

    return transformed


def _grad_of_scan(function: Function) -> Function:
    return lambda x, count: jax.grad(lambda x: jnp.sum(jnp.real(_scan(lambda x: function(x * x))(x, count))))(x)


def _twice(function: Function) -> Function:
    """One lowered function, called twice."""
    inner = jax.jit(function)
    return lambda x, count: (inner(x), inner(x + x))


def _vmap(function: Function) -> Function:
    """Maps a new last dimension, which comes first in the result; then one that only a captured operand lacks."""
    return lambda x, count: jax.vmap(function, in_axes=x.ndim, out_axes=0)(jnp.stack([x, x + x, x], axis=-1))


def _vmap_named(function: Function) -> Function:
    return lambda x, count: jax.vmap(function, axis_name=NAMED[0])(jnp.stack([x, x + x, x, x * x][: NAMED[1]]))


def _pytree(function: Function) -> Function:
    return lambda x, count: function({"a": x, "b": (x.astype("int16"), [x + x])})


TRANSFORMS: dict[str, Function] = {
    "jit": _plain,
    "eager": _plain,
    "aot": _plain,
    "donate": _plain,
    "context_mesh": _plain,
    "twice": _twice,
    "pytree": _pytree,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "vmap": _vmap,
    "vmap_named": _vmap_named,
    "vmap_named_and_mesh": _vmap_named,
    "jvp": lambda function: lambda x, count: jax.jvp(function, (x,), (x + x,)),
    "vjp": _vjp,
    "remat": _remat,
    "grad_of_scan": _grad_of_scan,
    "vmap_of_vjp": lambda function: _vmap(lambda x: _vjp(function)(x, None)),
}
DIFFERENTIATED = ("jvp", "vjp", "remat", "grad_of_scan", "vmap_of_vjp")


def _applies(transform: str, operation: str) -> bool:
    """Is it something that jax.lax can do too?"""
    if operation == "send_recv":  # needs a program around it, and has no rules for transformations
        return transform not in DIFFERENTIATED and transform != "eager" and not transform.startswith("vmap")
    if (
        operation == "ragged_all_to_all"
    ):  # jax.lax's rules for it lack the mapped axis; the sizes are arrays, which scans would have to carry
        return not transform.startswith("vmap_named")
    return transform != "vmap_named_and_mesh" or operation == "all_to_all"


# What it runs on


def _case(rng: random.Random, number: int, operation: str, transform: str, dtype: str, device_count: int) -> Case:
    sizes = rng.choice(_factorizations(device_count))
    names = rng.sample("abc", len(sizes))
    mesh = tuple(zip(names, sizes, strict=True))
    axis_name = rng.sample(names, rng.randint(1, len(names)))
    size = math.prod(dict(mesh)[name] for name in axis_name)
    if transform == "vmap_named":
        axis_name, size = [NAMED[0]], NAMED[1]
    elif transform == "vmap_named_and_mesh":
        axis_name.insert(rng.randint(0, len(axis_name)), NAMED[0])
        size *= NAMED[1]
    shape = [rng.choice((1, 2, 3, 5, 7)) for _ in range(rng.randint(0, 3))]
    if shape and rng.random() < 0.08:
        shape[rng.randrange(len(shape))] = 0

    arguments: dict[str, Any] = {"axis_name": axis_name[0] if len(axis_name) == 1 and rng.random() < 0.7 else tuple(axis_name)}
    groups = None
    if operation in ("all_gather", "all_to_all") and "vmap" not in transform and size > 1 and rng.random() < 0.3:
        groups = _random_groups(rng, size)
        size = len(groups[0])
        arguments["axis_index_groups"] = groups
    arguments |= _ARGUMENTS[operation](rng, size, shape)
    check_vma = rng.random() < 0.5
    # Where jax.lax itself fails there is nothing to compare with. tests/unit/test_beyond_lax.py tests these.
    if operation == "all_gather" and arguments["tiled"] and shape[arguments["axis"]] == 0:
        shape[arguments["axis"]] = 1
    if transform == "vmap_of_vjp" and operation == "all_gather" and not arguments["tiled"]:
        arguments["axis"] = len(shape)
    if operation == "ragged_all_to_all" and transform.startswith("vmap"):
        shape = [max(1, extent) for extent in shape]
    if transform in DIFFERENTIATED and operation == "all_to_all" and not arguments["tiled"]:
        arguments["concat_axis"] = arguments["split_axis"]
    if transform.startswith("vmap_named"):
        check_vma = False
    has_no_zero = dtype == "float8_e8m0fnu"
    if operation in ("ppermute", "send_recv") and (transform == "vmap_named" or has_no_zero):
        arguments["perm"] = tuple(enumerate(rng.sample(range(size), size)))
    if operation == "all_gather" and check_vma and groups is None and "vmap" not in transform and rng.random() < 0.2:
        arguments["to"] = "invarying"
    priority = rng.choice(("foreground", "foreground", "background"))
    overlap = rng.random() < 0.5
    # jax.lax.pbroadcast and all_gather(to="reduced") want operands that differ over the axis; the others accept any.
    input_axes = (
        tuple(names)
        if operation in ("pbroadcast", "send_recv", "exchange", "ragged_all_to_all")
        else tuple(rng.sample(names, rng.randint(1, len(names))))
    )
    return Case(number, operation, transform, dtype, tuple(shape), mesh, input_axes, tuple(arguments.items()), priority, overlap, check_vma)


def _all_gather_arguments(rng: random.Random, _size: int, shape: list[int]) -> dict[str, Any]:
    tiled = bool(shape) and rng.random() < 0.5
    axis = rng.randrange(len(shape) + (not tiled))
    return {"axis": axis, "tiled": tiled}


def _all_to_all_arguments(rng: random.Random, size: int, shape: list[int]) -> dict[str, Any]:
    """Makes `shape` fit: the split dimension is (untiled) or is divisible by (tiled) the number of ranks."""
    if not shape:
        shape.append(1)
    split, concat = rng.randrange(len(shape)), rng.randrange(len(shape))
    tiled = rng.random() < 0.5
    shape[split] = size * shape[split] if tiled else size
    return {"split_axis": split, "concat_axis": concat, "tiled": tiled}


def _permute_arguments(rng: random.Random, size: int, _shape: list[int]) -> dict[str, Any]:
    sources = rng.sample(range(size), rng.randint(0, size))
    return {"perm": tuple(zip(sources, rng.sample(range(size), len(sources)), strict=True))}


def _flow_arguments(rng: random.Random, size: int, shape: list[int]) -> dict[str, Any]:
    """Blocks of random sizes between random ranks. They don't overlap in the operand either, so that each has a gradient of its own."""
    if not shape:
        shape.append(rng.choice((1, 2, 3, 5, 7)))
    rows = rng.choice((1, 3, 8))
    read, written = [0] * size, [0] * size
    flows = []
    for _ in range(rng.randint(0, 4 * size)):
        src, dst, count = rng.randrange(size), rng.randrange(size), rng.randint(1, 3)
        if read[src] + count <= shape[0] and written[dst] + count <= rows:
            flows.append(hoccl_jax.Flow(src, dst, read[src], written[dst], count))
            read[src] += count
            written[dst] += count + rng.randint(0, 1)
    return {"flows": tuple(flows), "rows": rows}


_ARGUMENTS: dict[str, Callable[[random.Random, int, list[int]], dict[str, Any]]] = {
    "all_gather": _all_gather_arguments,
    "all_to_all": _all_to_all_arguments,
    "ppermute": _permute_arguments,
    "send_recv": _permute_arguments,
    "exchange": _flow_arguments,
    "ragged_all_to_all": _flow_arguments,
    "pshuffle": lambda rng, size, _shape: {"perm": tuple(rng.sample(range(size), size))},
    "pbroadcast": lambda rng, size, _shape: {"source": rng.randrange(size)},
}


def _factorizations(count: int) -> list[tuple[int, ...]]:
    """Meshes of one to three axes."""
    divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
    two = [(a, count // a) for a in divisors]
    return [(count,), *two, *((a, b, rest // b) for a, rest in two for b in divisors if rest % b == 0)]


def _random_groups(rng: random.Random, size: int) -> list[list[int]]:
    group_size = rng.choice([divisor for divisor in range(1, size + 1) if size % divisor == 0])
    ranks = rng.sample(range(size), size)
    return [ranks[start : start + group_size] for start in range(0, size, group_size)]


def _inputs(case: Case, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """The operands of all ranks, stacked, and a number that all know (2)."""
    rng = np.random.default_rng(case.number)
    blocks = math.prod(mesh.shape[name] for name in case.input_axes)
    values = _values(rng, case, (blocks, *case.shape))
    operand = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P(case.input_axes)), lambda index: values[index])
    return operand, jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda index: np.array(2, np.int32)[index])


def _values(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """No NaN: XLA:CPU may widen small floats for its own collectives, which changes the NaN's bits."""
    if case.dtype == "key<fry>":
        return rng.integers(0, 2**32, (*shape, 2), np.uint32)
    dtype = jnp.dtype(case.dtype)
    if case.transform in DIFFERENTIATED:
        return rng.integers(0, 4, shape).astype(dtype)  # sums and products stay exact
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        normal = rng.standard_normal(shape)
        return (np.abs(normal) if case.dtype == "float8_e8m0fnu" else normal).astype(dtype)
    if case.dtype == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    info = jnp.iinfo(dtype)
    return rng.integers(int(info.min), int(info.max), shape, np.uint64 if info.min == 0 else np.int64, endpoint=True).astype(dtype)


def _bits(array: jax.Array) -> np.ndarray:
    values = np.ascontiguousarray(array)
    return np.frombuffer(values.tobytes(), np.dtype((np.void, values.itemsize)) if values.size else np.uint8).view(np.uint8)


@contextlib.contextmanager
def _any_axis_order() -> Iterator[None]:
    """jax.lax.ppermute refuses axes in another order than the mesh's unless it is told to take them."""
    option = "jax_raise_on_ppermute_sort_diff"
    if not hasattr(jax.config, option):
        yield
        return
    jax.config.update(option, False)
    try:
        yield
    finally:
        jax.config.update(option, True)
