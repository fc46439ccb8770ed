"""What each process of a GPU job does: `gpu_worker.py TASK [ARGUMENTS as JSON]`, with one GPU a process, which several may share.

The last line is `RESULT ` with JSON; lines that begin with `PARTIAL ` have what was found until then. benchmarks/gpu_check.py starts the
jobs and makes the table. With GPU_WORKER_NODES=n the processes are n nodes, evenly.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from benchmarks import nccl_task, nvswitch, peer_copy
from benchmarks.gpu_cases import mixture, reshardings
from benchmarks.gpu_programs import PLATFORM, barrier, everyone, gpu_events, gpu_mesh, median_us, program, spread
from benchmarks.gpu_random import random_operations
from benchmarks.gpu_shared import overlapped, priorities
from benchmarks.gpu_training import fsdp_step, helper_values, pipeline_step
from tests import cases


def equivalence(seed: int, count: int) -> dict[str, Any]:
    """The random cases, against jax.lax on CPU devices of this process."""
    devices = jax.devices(PLATFORM)
    reference = jax.local_devices(backend="cpu")[: len(devices)]
    failed: dict[str, str] = {}
    ran = 0
    for case in cases.generate(len(devices), seed, count):
        print(f"case {case}", flush=True)  # which one it was, should the process die
        try:
            if PLATFORM == "cpu":
                cases.check(case, devices)
            else:
                cases.check_across(case, devices, reference)
        except Exception:
            failed[str(case)] = traceback.format_exc()[-1500:]
            if len(failed) > 5:
                break
        ran += 1
    hoccl_jax.check_errors()
    return {"ran": ran, "failed": failed, "stats": hoccl_jax.stats()}


def messages(rounds: int) -> dict[str, Any]:
    """Programs of one device each: all send to all others, with several tags, and then receive, in the opposite order of tags."""
    devices = jax.devices(PLATFORM)
    tags = (1, 2, 3)

    def content(source: int, tag: int, number: Any) -> jax.Array:
        return jnp.arange(100_000, dtype=jnp.int32) * tag + source * 1000 + number

    def program_of(own: jax.Device) -> Any:
        others = [device for device in devices if device != own]

        def swap(number: jax.Array) -> jax.Array:
            for tag in tags:
                for other in others:
                    hoccl_jax.send(content(own.id, tag, number), other, tag=tag)
            wrong = number * 0
            for tag in reversed(tags):
                for other in others:
                    received = hoccl_jax.recv(jax.ShapeDtypeStruct((100_000,), jnp.int32), other, tag=tag)
                    wrong += jnp.sum(received != content(other.id, tag, number))
            return wrong

        return jax.jit(swap)

    programs = {device: program_of(device) for device in devices if device.process_index == jax.process_index()}
    wrong = [
        program(jax.device_put(np.int32(number), device)) for number in range(rounds) for device, program in programs.items()
    ]  # without waiting in between
    total = int(sum(int(each) for each in wrong))
    hoccl_jax.check_errors()
    return {"rounds": rounds, "wrong": total, "stats": hoccl_jax.stats()}


LIBRARIES = {"hoccl_jax": hoccl_jax, "jax.lax": jax.lax}


_ROW_BYTES = 64  # of the ragged operation's slices
_GATHERED_BYTES = 8 << 30  # of all results of a chain of all-gathers, which live until its end


def _skewed(count: int) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """The ragged operation's operand, `count` bytes a rank and Zipf-skewed, and what runs it: (library, operand, output) -> output."""
    size = gpu_mesh().size
    rows = nvswitch.bytes_between("ragged_all_to_all", count, size) // _ROW_BYTES
    input_offsets = np.cumsum(rows, axis=1) - rows
    output_offsets = np.cumsum(rows, axis=0) - rows
    operand = spread(max(1, int(rows.sum(axis=1).max())), _ROW_BYTES // 4)
    received = max(1, int(rows.sum(axis=0).max()))

    def operation(library: Any, x: jax.Array, output: jax.Array | None) -> jax.Array:
        rank = jax.lax.axis_index("x")
        if output is None:
            output = jax.lax.pcast(jnp.zeros((received, _ROW_BYTES // 4), x.dtype), "x", to="varying")
        indices = [jnp.asarray(table, jnp.int32)[rank] for table in (input_offsets, rows, output_offsets, rows.T)]
        return library.ragged_all_to_all(x, output, *indices, axis_name="x")

    return operand, operation


CHAINS = ("ppermute", "send", "all_to_all", "all_gather", "broadcast", "ragged_all_to_all")


def _broadcast(library: Any, x: jax.Array, **more: Any) -> jax.Array:
    if PLATFORM == "cpu" and library is jax.lax:  # whose pbroadcast is for GPUs
        return jax.lax.pcast(jax.lax.psum(jnp.where(jax.lax.axis_index("x") == 0, x, 0), "x"), "x", to="varying")
    return library.pbroadcast(x, "x", 0, **more)


def _chain(operation: str, library: Any, steps: int, skewed: Callable[..., jax.Array]) -> Callable[[jax.Array], Any]:
    """`steps` times the operation, each of which depends on the one before."""
    size = gpu_mesh().size
    more = {"overlap": False} if library is hoccl_jax else {}
    one: dict[str, Callable[[jax.Array], jax.Array]] = {
        "ppermute": lambda x: library.ppermute(x, "x", [(r, (r + 1) % size) for r in range(size)], **more),
        "send": lambda x: library.ppermute(x, "x", [(0, 1)], **more),
        "all_to_all": lambda x: library.all_to_all(x, "x", 0, 0, tiled=True, **more),
        "broadcast": lambda x: _broadcast(library, x, **more),
    }

    def chain(x: jax.Array) -> Any:
        if operation == "ragged_all_to_all":
            output = None
            for _ in range(steps):
                output = skewed(library, x, output)
            return output
        if operation == "all_gather":
            results = []
            for _ in range(steps):  # the next operand depends on the last result, but is not a copy of it
                gathered = library.all_gather(x, "x", tiled=True, **more)
                x, gathered = jax.lax.optimization_barrier((x, gathered))
                results.append(gathered)
            return results
        for _ in range(steps):
            x = one[operation](x)
        return x

    chain.__name__ = operation
    return chain


def _in_a_row(count: int) -> int:
    """How many executions of a chain follow each other without waiting, so that neither one's dispatch nor that the ranks begin up to a
    millisecond apart counts for much."""
    return 10 if count < 8 << 20 else 4


def _chain_entry(operation: str, library: Any, argument: jax.Array, steps: int, skewed: Any, repeats: int, calls: int) -> dict[str, Any]:
    step = program(_chain(operation, library, steps, skewed))

    def run() -> Any:
        result = None
        for _ in range(calls):
            result = step(argument)
        return result

    jax.block_until_ready(run())
    hoccl_jax.reset_stats()
    entry: dict[str, Any] = {"us": median_us(run, steps * calls, repeats)}
    if library is hoccl_jax:
        counts = hoccl_jax.stats()
        entry["host_us"] = counts["handlers"]["nanoseconds"] / max(1, counts["handlers"]["calls"]) / 1e3
        entry |= {"in_stream": counts["pushes"]["in_stream"], "proxy": counts["pushes"]["proxy"]}
    return entry


def chains(sizes: list[int], steps: int, libraries: list[str], repeats: int = 20, operations: Sequence[str] = CHAINS) -> dict[str, Any]:
    """Dependent operations in one program, us each: bytes are those of each rank's operand. Libraries take turns size by size.

    What fails gets {"failed": text}, and is left out from then on.
    """
    size = gpu_mesh().size
    result: dict[str, Any] = {}
    failed = {("jax.lax", "ragged_all_to_all")} if PLATFORM == "cpu" else set()  # it is for GPUs
    for count in sizes:
        x = spread(size, max(1, count // 4 // size))
        operand, skewed = _skewed(count) if "ragged_all_to_all" in operations else (x, None)
        gathers = max(1, min(steps, _GATHERED_BYTES // (count * size)))
        for name, operation in itertools.product(libraries, operations):
            if (name, operation) in failed:
                continue
            argument = operand if operation == "ragged_all_to_all" else x
            times = gathers if operation == "all_gather" else steps
            try:
                entry = _chain_entry(operation, LIBRARIES[name], argument, times, skewed, repeats, _in_a_row(count))
            except Exception:
                failed.add((name, operation))
                entry = {"failed": traceback.format_exc()[-1500:]}
                everyone("failed")  # one that failed alone waits here in vain, and the job ends
            result[f"{name} {operation} {count}"] = entry
    try:
        hoccl_jax.check_errors()
    except RuntimeError as error:
        result["hoccl_jax"] = {"failed": str(error)}
    return result


def profile(steps: int, overlap: bool) -> dict[str, Any]:
    """What runs on the GPU in a program of all-gathers and ppermutes and nothing else: name and memory -> how often, and us in all."""
    ring = [(r, (r + 1) % gpu_mesh().size) for r in range(gpu_mesh().size)]

    def body(x: jax.Array) -> list[jax.Array]:
        results = []
        for _ in range(steps):
            x = hoccl_jax.ppermute(x, "x", ring, overlap=overlap)
            results.append(hoccl_jax.all_gather(x, "x", tiled=True, overlap=overlap))
        return results

    step = program(body)
    x = spread(256, 1024)
    for _ in range(3):  # what comes again may be enqueued otherwise
        jax.block_until_ready(step(x))
    hoccl_jax.reset_stats()
    seen: dict[str, Any] = {}
    for event in gpu_events(lambda: step(x)):
        entry = seen.setdefault(f"{event['name']} {event.get('memcpy_details', '')}", {"count": 0, "us": 0.0})
        entry["count"] += 1
        entry["us"] += event["us"]
    return {**seen, "pushes": hoccl_jax.stats()["pushes"]}


def interference(size: int, count: int, moved: int, libraries: list[str], events: bool = False) -> dict[str, Any]:
    """us of `count` products of size x size matrices alone, and beside one transfer of `moved` bytes that takes almost as long."""
    mesh = gpu_mesh()
    ring = [(r, (r + 1) % mesh.size) for r in range(mesh.size)]
    key = jax.random.key(0)
    weights = jax.jit(lambda: jax.random.normal(key, (mesh.size * size, size), jnp.bfloat16), out_shardings=NamedSharding(mesh, P("x")))()
    x = jax.jit(lambda: jnp.ones((mesh.size * 1024, moved // 4096), jnp.float32), out_shardings=NamedSharding(mesh, P("x")))()

    def gemms(w: jax.Array) -> jax.Array:
        y = w
        for _ in range(count):
            y = (y @ w) * jnp.bfloat16(0.01)
        return y

    def jitted(function: Callable[..., Any], inputs: int) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P("x"),) * inputs, out_specs=P("x")))

    programs: dict[str, tuple[Any, tuple[Any, ...]]] = {"gemms": (jitted(gemms, 1), (weights,))}
    for name in libraries:
        permute = LIBRARIES[name].ppermute
        programs[f"{name} transfer"] = (jitted(lambda x, permute=permute: permute(x, "x", ring), 1), (x,))
        both = jitted(lambda x, w, permute=permute: (permute(x, "x", ring), gemms(w)), 2)
        programs[f"{name} both"] = (both, (x, weights))
    halves = jitted(lambda x, w: hoccl_jax.overlap(hoccl_jax.ppermute_start(x, "x", ring), gemms, w), 2)
    programs["hoccl_jax both, start and done"] = (halves, (x, weights))
    if events:
        step, arguments = programs[f"{libraries[0]} both"]
        jax.block_until_ready(step(*arguments))
        first = gpu_events(lambda: step(*arguments))
        return {
            "events": [(e["device"][-1], e["stream"][:12], e["name"][:24], round(e["at"] - first[0]["at"]), round(e["us"])) for e in first]
        }
    times: dict[str, list[float]] = collections.defaultdict(list)
    for i in range(4):  # in turns
        for name, (step, arguments) in programs.items():
            time_us = median_us(functools.partial(step, *arguments), 1, 5)
            if i > 0:
                times[name].append(time_us)
    return {name: statistics.median(values) for name, values in times.items()}


def gathered_forward(rows: int, libraries: list[str], layers: int = 8, width: int = 8192) -> dict[str, Any]:
    """us of a forward pass whose weights are gathered layer by layer, the next one during the present one; and of its products alone."""
    mesh = gpu_mesh()
    shards = [
        jax.jit(
            lambda i=i: jax.random.normal(jax.random.key(i), (width, width), jnp.bfloat16) * 0.01, out_shardings=NamedSharding(mesh, P("x"))
        )()
        for i in range(layers)
    ]
    x = jax.jit(lambda: jnp.ones((mesh.size * rows, width), jnp.bfloat16), out_shardings=NamedSharding(mesh, P("x")))()
    whole = jax.jit(lambda w: w, out_shardings=NamedSharding(mesh, P()))(shards[0])

    def alone(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(layers):
            x = jnp.maximum(x @ w, 0)
        return x

    def gathered(library: Any) -> Callable[..., jax.Array]:
        def forward(x: jax.Array, *shards: jax.Array) -> jax.Array:
            full = library.all_gather(shards[0], "x", tiled=True)
            for i in range(layers):
                if i + 1 < layers:
                    following, x = hoccl_jax.prefetch_barrier(shards[i + 1], x)
                    next_full = library.all_gather(following, "x", tiled=True)
                x = jnp.maximum(x @ full, 0)
                full = next_full
            return x

        return forward

    specs = (P("x"),) * (layers + 1)
    programs: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "compute alone": (jax.jit(jax.shard_map(alone, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))), (x, whole))
    }
    for name in libraries:
        forward = jax.shard_map(gathered(LIBRARIES[name]), mesh=mesh, in_specs=specs, out_specs=P("x"))
        programs[name] = (jax.jit(forward), (x, *shards))
    times: dict[str, list[float]] = collections.defaultdict(list)
    outcomes = {}
    for i in range(4):  # in turns
        for name, (step, arguments) in programs.items():
            outcomes[name] = step(*arguments)
            time_us = median_us(functools.partial(step, *arguments), 1, 7)
            if i > 0:
                times[name].append(time_us)
    ours, theirs = (outcomes[name].addressable_shards for name in libraries)
    equal = all((np.asarray(a.data) == np.asarray(b.data)).all() for a, b in zip(ours, theirs, strict=True))
    return {**{name: statistics.median(values) for name, values in times.items()}, "equal": bool(equal)}


def limits(sizes: list[int]) -> dict[str, Any]:
    if PLATFORM == "cpu":
        return dict.fromkeys([f"{ways} {size}" for ways in ("one way", "both ways") for size in sizes], 1.0)
    return peer_copy.pairs(sizes)


_CHECKS = (equivalence, messages, random_operations, mixture, reshardings, helper_values)
_TRANSFERS = (limits, nccl_task.nccl, chains, profile, interference, overlapped, priorities)
_MODELS = (gathered_forward, fsdp_step, pipeline_step)
TASKS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (*_CHECKS, *_TRANSFERS, *_MODELS)}


def _let_nccl_share_a_gpu() -> None:
    """NCCL refuses a GPU to two ranks of one host. They say that they are of different ones: gradients have reductions of jax.lax."""
    if len(set(everyone(os.environ.get("JAX_LOCAL_DEVICE_IDS", "")))) < jax.process_count():
        os.environ.update(NCCL_HOSTID=f"rank{jax.process_index()}", NCCL_SOCKET_IFNAME="lo")


def main() -> None:
    task = sys.argv[1]
    arguments = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    if nodes := int(os.environ.get("GPU_WORKER_NODES", "0")):
        os.environ["HOCCL_NODE_ID"] = str(jax.process_index() * nodes // jax.process_count())
    if jax.process_count() > 1 and PLATFORM != "cpu":
        _let_nccl_share_a_gpu()
    hoccl_jax.init()
    outcome = TASKS[task](**arguments)
    barrier("end")
    os.write(sys.stdout.fileno(), f"\nRESULT {json.dumps(outcome)}\n".encode())


if __name__ == "__main__":
    main()
