"""Trains a small GPT on 8 CPU devices with pipeline and fully-sharded data parallelism, on hoccl_jax and on jax.lax, and compares the two.

    python examples/pipeline_training.py                  # one process
    python examples/pipeline_training.py --processes 2    # 2 processes x 4 devices: the script launches itself

The mesh has two axes. Along `stage` the layers are split: microbatches enter at the first stage, activations go from stage to stage and
cotangents back, by the 1F1B schedule of `hoccl_jax.parallel.pipeline` (or by GPipe: --schedule). Along `fsdp` the batch and each layer's
parameters are split: a layer's parameters are one flat vector, which `hoccl_jax.parallel.fsdp` gathers while the layer before it
computes, again in the backward pass, and whose gradient it reduces and scatters. The text is Python's own language reference as pydoc
carries it, one token a byte.

Both trainers start from the same seed and take turns step by step. The collectives only move bytes, so the two loss curves must be
identical bit for bit: the script ends with an error at the first step where they are not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tabulate import tabulate
from tqdm import tqdm

import hoccl_jax
from hoccl_jax.parallel import fsdp, pipeline
from hoccl_jax.tools import launch

_DEVICES = 8
_VOCABULARY = 256  # a token is a byte
_HEAD_WIDTH = 32

_STEPS = flags.DEFINE_integer("steps", 60, "Optimiser steps.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 8, "Transformer layers, a multiple of --stages.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 96, "Width of the residual stream, a multiple of 32.", lower_bound=32)
_SEQUENCE = flags.DEFINE_integer("sequence", 64, "Tokens in a sequence.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches in a step.", lower_bound=1)
_MICROBATCH = flags.DEFINE_integer("microbatch", 4, "Sequences in a microbatch, a multiple of 8 / --stages.", lower_bound=1)
_STAGES = flags.DEFINE_enum("stages", "4", ["1", "2", "4", "8"], "Pipeline stages; the parameters are sharded over 8 / stages devices.")
_SCHEDULE = flags.DEFINE_enum("schedule", "1f1b", ["1f1b", "gpipe"], "Order of the pipeline's work.")
_PROCESSES = flags.DEFINE_enum("processes", "1", ["1", "2", "4", "8"], "Processes that share the 8 devices.")
_COLLECTIVES = flags.DEFINE_enum("collectives", "both", ["both", "hoccl", "lax"], "Who moves the data.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Adam's learning rate.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the initial parameters and of the batches.")
_LOG_EVERY = flags.DEFINE_integer("log_every", 5, "Steps between two reports of the loss.", lower_bound=1)


class Collectives(NamedTuple):
    """The operations that the trainer leaves open."""

    all_gather: Callable[..., jax.Array]
    ppermute: Callable[..., jax.Array] | None  # None: hoccl_jax's, in two halves with computation between them


def collectives(name: str) -> Collectives:
    if name == "lax":
        return Collectives(jax.lax.all_gather, jax.lax.ppermute)
    return Collectives(hoccl_jax.all_gather, None)


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int
    sequence: int
    microbatches: int
    microbatch: int
    stages: int
    schedule: Any  # "1f1b" or "gpipe"
    learning_rate: float
    seed: int

    def __post_init__(self) -> None:
        for what, value, unit in [
            ("--layers", self.layers, self.stages),
            ("--width", self.width, _HEAD_WIDTH),
            ("--microbatch", self.microbatch, _DEVICES // self.stages),
        ]:
            if value % unit:
                raise app.UsageError(f"{what} is {value}, it must be a multiple of {unit}")

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        w = self.width
        return {"norm1": (w,), "qkv": (w, 3 * w), "proj": (w, w), "norm2": (w,), "up": (w, 4 * w), "down": (4 * w, w)}

    @property
    def ends_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the first and the last stage need besides their layers."""
        w = self.width
        return {"embed": (_VOCABULARY, w), "position": (self.sequence, w), "norm": (w,), "head": (w, _VOCABULARY)}


class State(NamedTuple):
    """A trainer's state: trees of `{"layers": [layers, size], "ends": [size]}`, and the number of steps taken.

    Fields are arrays, or what stands for them: their initial values, their shardings.
    """

    params: Any
    mean: Any
    variance: Any
    step: Any


# The state's shardings. A vector's length is a multiple of the width, so all 8 devices get equal shares.
_PARAM_SPECS = {"layers": P("stage", "fsdp"), "ends": P(("stage", "fsdp"))}
_STATE_SPECS = State(_PARAM_SPECS, _PARAM_SPECS, _PARAM_SPECS, P())


def unflatten(flat: jax.Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), jnp.split(flat, ends[:-1]), strict=True)}


def initial_vector(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Norm scales of 1 and matrices of variance 1 / rows, as one flat vector."""
    parts = [np.ones(s) if len(s) == 1 else rng.normal(size=s) / math.sqrt(s[0]) for s in shapes.values()]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def put(mesh: Mesh, value: np.ndarray, spec: P) -> jax.Array:
    """A global array from a value that every process has."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def initial_state(config: Config, mesh: Mesh) -> State:
    rng = np.random.default_rng(config.seed)
    params = {
        "layers": np.stack([initial_vector(rng, config.layer_shapes) for _ in range(config.layers)]),
        "ends": initial_vector(rng, config.ends_shapes),
    }
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    return jax.tree.map(functools.partial(put, mesh), State(params, zeros, zeros, np.zeros((), np.int32)), _STATE_SPECS)


def normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def transformer_layer(x: jax.Array, p: Mapping[str, jax.Array]) -> jax.Array:
    """[sequences, tokens, width] -> the same shape."""
    heads = (*x.shape[:2], x.shape[2] // _HEAD_WIDTH, _HEAD_WIDTH)
    q, k, v = (part.reshape(heads) for part in jnp.split(normalise(x) * p["norm1"] @ p["qkv"], 3, axis=-1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["proj"]
    return x + jax.nn.gelu(normalise(x) * p["norm2"] @ p["up"]) @ p["down"]


def next_token_loss(x: jax.Array, targets: jax.Array, ends: Mapping[str, jax.Array]) -> jax.Array:
    """Mean cross entropy, nats per token."""
    logits = normalise(x) * ends["norm"] @ ends["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1))


def pipeline_loss(config: Config, comm: Collectives, params: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """This device's contribution to the loss, inside shard_map: the sum over the mesh is the mean over the batch.

    Args:
      params: this device's shards: `layers` [layers / stages, size / fsdp], `ends` [size / 8].
      tokens: [microbatches, microbatch / fsdp, sequence + 1], the same along `stage`.
    """

    def embed(params: Any, tokens: jax.Array) -> jax.Array:
        return params["ends"]["embed"][tokens[:, :-1]] + params["ends"]["position"]

    def layer(flat: jax.Array, x: jax.Array) -> jax.Array:
        return transformer_layer(x, unflatten(flat, config.layer_shapes))

    def stage(params: Any, x: jax.Array) -> jax.Array:
        return fsdp.apply_layers(layer, params["layers"], x, axis_name="fsdp", all_gather=comm.all_gather)

    def head(params: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        return next_token_loss(x, tokens[:, 1:], params["ends"])

    ends = unflatten(comm.all_gather(params["ends"], ("stage", "fsdp"), tiled=True), config.ends_shapes)
    whole = {"layers": params["layers"], "ends": ends}
    loss = pipeline.loss(embed, stage, head, whole, tokens, axis_name="stage", schedule=config.schedule, ppermute=comm.ppermute)
    return loss / (config.microbatches * jax.lax.axis_size("fsdp"))


def adam(config: Config, state: State, gradients: Any) -> State:
    """One step of Adam. Elementwise, so that each device updates its own shards."""
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradients)
    variance = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state.variance, gradients)
    rate = config.learning_rate * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), state.params, mean, variance)
    return State(params, mean, variance, step)


def make_step(config: Config, mesh: Mesh, comm: Collectives) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(functools.partial(pipeline_loss, config, comm))(state.params, tokens)
        return adam(config, state, gradients), jax.lax.psum(loss, ("stage", "fsdp"))

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(_STATE_SPECS, P(None, "fsdp")), out_specs=(_STATE_SPECS, P()))
    return jax.jit(sharded, donate_argnums=0)


class Trainer:
    """One of the two runs: its state, its losses and the time of each step in seconds."""

    def __init__(self, name: str, config: Config, mesh: Mesh):
        self.name = name
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._step = make_step(config, mesh, collectives(name))
        self._state = initial_state(config, mesh)

    def step(self, tokens: jax.Array) -> float:
        start = time.perf_counter()
        self._state, loss = self._step(self._state, tokens)
        self.losses.append(float(loss))  # waits for the step
        self.seconds.append(time.perf_counter() - start)
        return self.losses[-1]

    def steps_per_second(self) -> float:
        """The median, without the first step, which compiles."""
        return 1 / statistics.median(self.seconds[1:] or self.seconds)


def batches(config: Config, mesh: Mesh, steps: int) -> Any:
    text = np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(config.seed)
    for _ in range(steps):
        starts = rng.integers(len(text) - config.sequence, size=(config.microbatches, config.microbatch, 1))
        yield put(mesh, text[starts + np.arange(config.sequence + 1)].astype(np.int32), P(None, "fsdp"))


def train(trainers: list[Trainer], data: Any, steps: int, log_every: int, quiet: bool) -> None:
    """Lets the trainers take turns; SystemExit at the first step after which their losses differ in a single bit."""
    with tqdm(data, total=steps, unit="step", disable=quiet) as progress:
        for step, tokens in enumerate(progress):
            losses = {trainer.name: trainer.step(tokens) for trainer in trainers}
            report = ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items())
            if len(set(losses.values())) != 1 or not all(map(math.isfinite, losses.values())):
                raise SystemExit(f"step {step}: the losses differ or aren't finite: {report}")
            if not quiet and (step % log_every == 0 or step == steps - 1):
                progress.write(f"step {step:4d}  loss {report}", file=sys.stdout)


def summary(trainers: list[Trainer]) -> str:
    rows = [(t.name, f"{t.steps_per_second():.2f}", f"{t.losses[0]:.6f}", f"{t.losses[-1]:.6f}") for t in trainers]
    return tabulate(rows, ["collectives", "steps/s", "first loss", "final loss"], tablefmt="github", disable_numparse=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    processes = int(_PROCESSES.value)
    if processes > 1 and not jax.distributed.is_initialized():
        echo = launch.only(0, sys.stdout.buffer)
        launch.run([__file__, *sys.argv[1:]], processes=processes, devices=_DEVICES // processes, echo=echo, timeout=None)
        return
    if processes == 1:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _DEVICES)
    stages = int(_STAGES.value)
    config = Config(
        layers=_LAYERS.value,
        width=_WIDTH.value,
        sequence=_SEQUENCE.value,
        microbatches=_MICROBATCHES.value,
        microbatch=_MICROBATCH.value,
        stages=stages,
        schedule=_SCHEDULE.value,
        learning_rate=_LEARNING_RATE.value,
        seed=_SEED.value,
    )
    # Stages are the outer axis: a process holds whole stages where it can, and only activations cross processes.
    mesh = Mesh(np.array(jax.devices()).reshape(stages, _DEVICES // stages), ("stage", "fsdp"))
    names = ["hoccl", "lax"] if _COLLECTIVES.value == "both" else [_COLLECTIVES.value]
    trainers = [Trainer(name, config, mesh) for name in names]
    train(trainers, batches(config, mesh, _STEPS.value), _STEPS.value, _LOG_EVERY.value, quiet=jax.process_index() != 0)
    if jax.process_index() == 0:
        print(summary(trainers))
        if len(trainers) > 1:
            print(f"The two loss curves are identical bit for bit over {_STEPS.value} steps.")


if __name__ == "__main__":
    app.run(main)
