"""Training steps of a GPT as tasks of benchmarks/gpu_worker.py: fully sharded and as a 1F1B pipeline, by hoccl_jax and by jax.lax (NCCL).

Times, losses, what ran on the GPU, the CPU time of the process. A form that fails on any rank is left out on all of them, and its error is
part of the result.
"""

from __future__ import annotations

import collections
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hoccl_jax
from benchmarks import gpu_model
from benchmarks.gpu_programs import PLATFORM, barrier, everyone, gpu_events, gpu_mesh

_LOSSES = 4  # steps whose losses are compared
_ROUNDS, _REPEATS = (2, 2) if PLATFORM == "cpu" else (4, 5)  # the first round does not count


class _Trainer:
    """A form of a step, and its parameters."""

    def __init__(self, step: Any, params: Any, *operands: Any):
        self._step = step
        self._params = params
        self._operands = operands

    def step(self) -> jax.Array:
        """One step; the loss's parts."""
        self._params, loss = self._step(self._params, *self._operands)
        return loss

    def loss(self) -> float:
        """One step, and its loss summed over all devices."""
        return sum(everyone(float(sum(np.sum(np.asarray(shard.data)) for shard in self.step().addressable_shards))))


def _error(function: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or (None, the error of the first rank that failed), the same on all ranks."""
    result, text = None, ""
    try:
        result = function()
    except Exception:
        text = traceback.format_exc()[-1200:]
    failures = [each for each in everyone(text) if each]
    return (None, failures[0]) if failures else (result, "")


def _prepare(trainers: dict[str, Callable[[], _Trainer]], result: dict[str, Any]) -> dict[str, _Trainer]:
    """Those whose first step ran. Compiles one after the other, so that a failure is known before the next begins."""
    ready = {}
    for name, make in trainers.items():
        start = time.monotonic()

        def first(make: Callable[[], _Trainer] = make) -> tuple[_Trainer, list[float]]:
            trainer = make()
            return trainer, [trainer.loss()]

        outcome, failure = _error(first)
        print(f"{name}: compiled in {time.monotonic() - start:.1f} s {failure}", flush=True)
        if failure:
            result["failed"][name] = failure
        else:
            ready[name], result["losses"][name] = outcome
    return ready


def _time(ready: dict[str, _Trainer], result: dict[str, Any]) -> None:
    """us and CPU us per step, medians; the forms take turns."""
    times, cpu = collections.defaultdict(list), collections.defaultdict(list)
    for turn in range(_ROUNDS):
        for name, trainer in ready.items():
            for repeat in range(_REPEATS):
                barrier(f"{name} {turn}/{repeat}")
                cpu_start, start = time.process_time(), time.perf_counter()
                jax.block_until_ready(trainer.step())
                end, cpu_end = time.perf_counter(), time.process_time()
                if turn > 0:
                    times[name].append((end - start) * 1e6)
                    cpu[name].append((cpu_end - cpu_start) * 1e6)
    result["us"] = {name: round(statistics.median(values), 1) for name, values in times.items()}
    result["cpu_us per step"] = {name: round(statistics.median(values)) for name, values in cpu.items()}


def sm_time(name: str, step: Callable[[], Any]) -> dict[str, float]:
    """us per GPU that NCCL's kernels, copies and other kernels took in one step."""
    local = max(1, len([device for device in gpu_mesh().devices.flat if device.process_index == jax.process_index()]))
    sums = dict.fromkeys(("nccl kernels us", "copies us", "other kernels us"), 0.0)

    def together() -> Any:
        barrier(f"events of {name}")  # within the trace: NCCL's kernels wait for each other, and the ranks' profilers start apart
        return step()

    for event in gpu_events(together):
        text = event["name"].lower()
        kind = "nccl kernels us" if "nccl" in text else "copies us" if "memcpy" in text else "other kernels us"
        sums[kind] += event["us"] / local
        if "graph" in text:
            sums["CUDA graphs us"] = sums.get("CUDA graphs us", 0.0) + event["us"] / local
    return {kind: round(us, 1) for kind, us in sums.items()}


def idle_cpu_us() -> float:
    """CPU us of this process, all threads, in a second in which nothing is asked of it."""
    barrier("idle")
    start = time.process_time()
    time.sleep(1)
    return round((time.process_time() - start) * 1e6)


def _measure(trainers: dict[str, Callable[[], _Trainer]]) -> dict[str, Any]:
    result: dict[str, Any] = {"failed": {}, "losses": {}}
    ready = _prepare(trainers, result)
    for name, trainer in ready.items():
        result["losses"][name] += [trainer.loss() for _ in range(_LOSSES - 1)]
    own = [name for name in ready if name.startswith("hoccl_jax")]
    if own:  # whole parameters without reductions learn something else
        others = [name for name in ready if name not in (own[0], "compute alone")]
        result["losses equal to hoccl_jax's bit for bit"] = {name: result["losses"][name] == result["losses"][own[0]] for name in others}
    _, failure = _error(lambda: _time(ready, result))
    if failure:
        result["failed"]["times"] = failure
        return result
    result["idle_cpu_us in 1 s"] = idle_cpu_us()
    result["SM time per step"] = {}
    for name, trainer in ready.items():
        sums, failure = _error(lambda name=name, trainer=trainer: sm_time(name, trainer.step))  # type: ignore[misc]
        result["SM time per step"][name] = failure or sums
    memory = jax.local_devices(backend=PLATFORM)[0].memory_stats() or {}
    result["peak GB"] = round(memory.get("peak_bytes_in_use", 0) / 1e9, 1)
    hoccl_jax.check_errors()
    return result


def fsdp_step(width: int, layers: int, sequence: int, sequences: int, forms: list[str]) -> dict[str, Any]:
    """A training step with parameters sharded over all devices; `sequences` are a device's."""
    mesh = gpu_mesh()
    config = gpu_model.Config(layers, width, sequence, sequences)
    batch = gpu_model.tokens(config, mesh, mesh.size, P("x"))

    def trainer(form: str) -> _Trainer:
        params = gpu_model.initial(config, mesh, stages=False)()
        whole = []
        if form == "compute alone":
            whole = [jax.jit(lambda layers: layers, out_shardings=NamedSharding(mesh, P()))(params["layers"])]
        return _Trainer(gpu_model.fsdp_step(config, mesh, form), params, batch, *whole)

    return _measure({form: lambda form=form: trainer(form) for form in forms})  # type: ignore[misc]


def pipeline_step(width: int, layers: int, sequence: int, sequences: int, microbatches: int, forms: list[str]) -> dict[str, Any]:
    """A training step of a 1F1B pipeline whose stages are the devices; `layers` are a stage's, `sequences` a microbatch's."""
    mesh = gpu_mesh()
    config = gpu_model.Config(layers, width, sequence, sequences)
    batch = gpu_model.tokens(config, mesh, microbatches, P())

    def trainer(form: str) -> _Trainer:
        return _Trainer(gpu_model.pipeline_step(config, mesh, form), gpu_model.initial(config, mesh, stages=True)(), batch)

    return _measure({form: lambda form=form: trainer(form) for form in forms})  # type: ignore[misc]


def _values(config: gpu_model.Config, mesh: Mesh, ours: bool) -> dict[str, Any]:
    """Losses and gradients of both helpers on one mesh, and the output of the sharded one."""
    all_gather = hoccl_jax.all_gather if ours else lax.all_gather
    ppermute = None if ours else lax.ppermute

    def placed(tree: Any, spec: P) -> Any:  # made on the CPU, so that both meshes get the same
        return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda index: a[index]), tree)

    def mapped(function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return (np.random.default_rng(sum(shape)).normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 2 else 16)).astype(np.float32)

    def params(*lead: int) -> Any:
        layers = {name: numbers((*lead, config.layers, *shape)) for name, shape in config.layer_shapes.items()}
        return {"layers": layers, "ends": numbers((*lead, config.ends_size))}

    sharded = params()
    sharded = {"layers": placed(sharded["layers"], P(None, "x")), "ends": placed(sharded["ends"], P("x"))}
    apply = gpu_model.by_helper(config, all_gather, halves=ours)

    def output(params: Any, batch: jax.Array) -> jax.Array:
        ends = gpu_model.ends_of(config, all_gather(params["ends"], "x", tiled=True))
        return apply(params["layers"], gpu_model.embed(ends, batch[0]))[None]

    def gradient(params: Any, batch: jax.Array) -> Any:
        loss, gradients = gpu_model.fsdp_gradient(config, apply, all_gather, params, batch)
        return loss[None], gradients

    def piped(params: Any, batch: jax.Array) -> Any:
        loss, gradients = gpu_model.pipeline_gradient(config, ppermute, params, batch)
        return loss[None], gradients

    batch = gpu_model.tokens(config, mesh, mesh.size, P("x"))
    specs = (gpu_model.FSDP_SPECS, P("x"))
    result = {"fsdp forward": mapped(output, specs, P("x"))(sharded, batch)}
    result["fsdp"] = mapped(gradient, specs, (P("x"), gpu_model.FSDP_SPECS))(sharded, batch)
    microbatches = gpu_model.tokens(config, mesh, 8, P())
    result["pipeline"] = mapped(piped, (P("x"), P()), P("x"))(placed(params(mesh.size), P("x")), microbatches)
    return result


def _place(shard: Any, array: jax.Array) -> int:
    """Which device of its mesh has the shard."""
    sharding: Any = array.sharding
    return list(sharding.mesh.devices.flat).index(shard.device)


def helper_values(width: int, layers: int, sequence: int) -> dict[str, Any]:
    """The helpers' losses and gradients in float32, against the same by jax.lax on the same GPUs, and on CPU devices of this process.

    For each the largest difference of an array, as a part of the array's largest element.
    """
    mesh = gpu_mesh()
    own = mesh if PLATFORM == "cpu" else Mesh(np.array(jax.local_devices(backend="cpu")[: mesh.size]), "x")
    config = gpu_model.Config(layers, width, sequence, 2, jnp.float32)
    with jax.default_matmul_precision("highest"):
        ours = jax.block_until_ready(_values(config, mesh, True))
        on_gpu = jax.block_until_ready(_values(config, mesh, False))
        on_cpu = jax.block_until_ready(_values(config, own, False))
    hoccl_jax.check_errors()

    def difference(our: jax.Array, their: jax.Array) -> float:
        wanted = {_place(shard, their): np.asarray(shard.data) for shard in their.addressable_shards}
        worst = 0.0
        for shard in our.addressable_shards:
            reference = wanted[_place(shard, our)]
            largest = max(float(np.abs(reference).max()), 1e-30)
            worst = max(worst, float(np.abs(np.asarray(shard.data) - reference).max()) / largest)
        return worst

    def differences(theirs: dict[str, Any]) -> dict[str, float]:
        return {name: max(jax.tree.leaves(jax.tree.map(difference, ours[name], theirs[name]))) for name in ours}

    losses = {name: sum(float(np.sum(np.asarray(s.data))) for s in ours[name][0].addressable_shards) for name in ours if name[-1] != "d"}
    return {"from the GPUs": differences(on_gpu), "from CPU devices": differences(on_cpu), "own part of the loss": losses}
