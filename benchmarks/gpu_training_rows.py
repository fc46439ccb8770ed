"""Rows of benchmarks/gpu_check.py on training steps, overlap and priorities: which jobs run, and what their results say."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Row = tuple[str, str, str]  # what, result, wanted
Run = Callable[[str, dict[str, Any], Any, dict[str, str]], list[Any]]  # (task, arguments, job, environment) -> what each rank returns

_TOLERANCE = 1e-4
_OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true"
_PIPELINED = (
    f"{_OVERLAP} --xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true"
    " --xla_gpu_enable_while_loop_double_buffering=true"
)
_GPT = {"width": 4096, "layers": 8, "sequence": 1024, "sequences": 2}
_STAGES = [{"width": 2048, "layers": layers, "sequence": 1024, "sequences": 2, "microbatches": 32 // layers} for layers in (4, 2)]
_SMALL = {"width": 64, "layers": 4, "sequence": 32}


def _outcome(run: Run, task: str, arguments: dict[str, Any], job: Any, env: dict[str, str]) -> list[Any]:
    """What `run` returns, or its own failure as text: a row that fails must not take the others with it."""
    try:
        return run(task, arguments, job, env)
    except Exception:
        return [f"failed: {traceback.format_exc()[-2000:]}"]


def _text(outcome: Any) -> str:
    return outcome if isinstance(outcome, str) else json.dumps(outcome)


def _values(run: Run, form: str, job: Any, env: dict[str, str]) -> Row:
    what = f"losses and gradients of FSDP and the pipeline against jax.lax, {form}"
    outcome = _outcome(run, "helper_values", _SMALL, job, env)
    references = ("from the GPUs", "from CPU devices")
    differences = [max(rank[name].values()) for rank in outcome if isinstance(rank, dict) for name in references]
    equal = len(differences) == len(references) * len(outcome) and all(each <= _TOLERANCE for each in differences)
    return (what, ("equal: " if equal else "DIFFERENT: ") + json.dumps(outcome), f"float32, within {_TOLERANCE:g} of the largest element")


def _priorities(run: Run, form: str, chain: int, job: Any, env: dict[str, str]) -> Row:
    outcome = _outcome(run, "priorities", {"size": 65536, "moved": 1 << 30, "chain": chain}, job, env)[0]
    return (f"{chain} ppermutes of 64 KiB beside background ones of 1 GiB, {form}", _text(outcome), "1.5 times idle and one chunk")


def one(run: Run, job: Any, env: dict[str, str]) -> Iterator[Row]:
    """Two processes that share a GPU."""
    overlapped = _outcome(run, "overlapped", {"size": 4096, "moved": 8 << 30}, job, env)[0]
    wanted = "1.03 of the longer; 2 % slower than beside a bare copy"
    yield ("products and a ppermute of 8 GiB as one program", _text(overlapped), wanted)
    yield _priorities(run, "one GPU for both", 50, job, env)
    yield _values(run, "one GPU for both", job, env)


def _steps(what: str, flags: str, outcome: Any) -> list[Row]:
    """A row of times, and one for each other thing that was measured."""
    what = f"{what}{f', {flags}' if flags else ''}"
    if not isinstance(outcome, dict):
        return [(f"{what}, us per step", str(outcome), "")]
    rest = dict(outcome)
    us = rest.pop("us", {})
    text = "; ".join(f"{name} {value:.0f}" for name, value in us.items())
    mine = min((name for name in us if name.startswith("hoccl_jax")), key=lambda name: us[name], default=None)
    if mine:
        theirs = {name: value for name, value in us.items() if name.startswith("jax.lax")}
        if theirs:
            best = min(theirs, key=lambda name: theirs[name])
            text += f"; the fastest of jax.lax ({best}) takes {theirs[best] / us[mine]:.3f} times as long as {mine}"
    rows = [(f"{what}, us per step", text or json.dumps(rest.get("failed")), "")]
    wanted = {"SM time per step": "hoccl_jax: no NCCL kernels but the reductions'", "idle_cpu_us in 1 s": "far below 1000000"}
    return rows + [(f"{what}: {name}", json.dumps(value), wanted.get(name, "")) for name, value in rest.items() if value not in ({}, None)]


def several(run: Run, job: Any, env: dict[str, str], gpus: int) -> Iterator[Row]:
    """A process on each GPU."""
    flagged = {name: {**env, "XLA_FLAGS": flags} for name, flags in (("latency hiding", _OVERLAP), ("pipelined too", _PIPELINED))}
    gpt = f"FSDP step of a GPT, {_GPT['layers']} layers of width {_GPT['width']}, {_GPT['sequence'] * _GPT['sequences']} tokens a GPU"
    # hoccl_jax's two forms are in jobs apart: after a failed exchange a process's later ones fail too.
    jobs = [
        ("", env, ["hoccl_jax", "jax.lax helper", "jax.lax scan", "compute alone"]),
        ("latency hiding", flagged["latency hiding"], ["hoccl_jax halves", "jax.lax helper", "jax.lax loop"]),
        ("pipelined too", flagged["pipelined too"], ["jax.lax scan"]),
    ]
    for flags, environment, forms in jobs:
        yield from _steps(gpt, flags, _outcome(run, "fsdp_step", {**_GPT, "forms": forms}, job, environment)[0])
    for stage in _STAGES:
        stages = f"1F1B step, {gpus} stages of {stage['layers']} layers of width {stage['width']}, {stage['microbatches']} microbatches"
        # Once: XLA's default schedule of it is that with the flag.
        yield from _steps(stages, "", _outcome(run, "pipeline_step", {**stage, "forms": ["hoccl_jax", "jax.lax"]}, job, env)[0])
    yield _priorities(run, "a GPU each", 50, job, env)
    yield _priorities(run, "a GPU each, all by the proxy", 50, job, {**env, "HOCCL_IN_STREAM_BYTES": "0"})
    yield _values(run, "a GPU each", job, {**env, "JAX_NUM_CPU_DEVICES": str(gpus)})
