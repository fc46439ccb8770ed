"""Compiles programs for H200s that are only described, and finds out from XLA's schedule what runs beside what."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hoccl_jax import _native, runtime

_TARGET_CONFIG = pathlib.Path(__file__).with_name("h200.txtpb")


@functools.cache
def _devices(count: int) -> Any:
    registrations = _native.registrations()
    runtime.register_targets()
    for target, stages in registrations["cpu"].items():
        if target not in registrations.get("CUDA", {}):  # compiling needs the first stage alone, which is the same on all platforms
            jax.ffi.register_ffi_target(target, stages, platform="CUDA")
    shape = f"1x1x{count}"
    config = _TARGET_CONFIG.read_text()
    return topologies.get_topology_desc(topology_name=shape, platform="cuda", target_config=config, topology=shape).devices


def mesh(**sizes: int) -> Mesh:
    """A mesh of described H200s of one host: `mesh(x=2)`."""
    return Mesh(np.array(_devices(int(np.prod(list(sizes.values()))))).reshape(tuple(sizes.values())), tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    operands: tuple[str, ...]
    text: str

    @property
    def kind(self) -> str:
        """The target of a custom call, else the opcode."""
        target = re.search(r'custom_call_target="(.*?)"', self.text)
        return target[1] if target else self.opcode


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Computations by name, each a list of instructions in the order of their execution."""

    computations: dict[str, list[Instruction]]
    entry: str
    conditionals: bool = False  # count a conditional as a product, which is to be in it

    def copies(self) -> list[Instruction]:
        return [i for i in self.instructions() if re.match(r"copy(-start)?$", i.opcode) or re.search(r"calls=%\w*copy", i.text)]

    def custom_calls(self, target: str) -> list[Instruction]:
        return [i for i in self.instructions() if i.kind == target]

    def transfers(self, computation: str | None = None) -> list[int]:
        """For each operation of hoccl_jax in this computation (default: the entry), in order of their starts: how many matrix products
        stand between its start and its end."""
        return self.spans("call-start", "call-done", computation)

    def halves(self, computation: str | None = None) -> list[int]:
        """The same for operations that the program starts and awaits itself."""
        return self.spans("hoccl_start", "hoccl_done", computation)

    def loops(self, count: int) -> list[str]:
        """Computations, other than the entry, with `count` operations of ours that are started and awaited there."""
        return [name for name in self.computations if name != self.entry and len(self.transfers(name)) == count]

    def instructions(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions

    def spans(self, start: str, end: str, computation: str | None = None) -> list[int]:
        """Products between each instruction of kind `start` and the one of kind `end` that has it as its last operand."""
        spans: dict[str, list[int]] = {}
        products = 0
        for instruction in self.computations[computation or self.entry]:
            if _is_product(instruction) or (self.conditionals and instruction.opcode == "conditional"):
                products += 1
            elif instruction.kind == start:
                spans[instruction.name] = [products, products]
            elif instruction.kind == end:
                spans[self._origin(instruction.operands[-1], computation)][1] = products
        return [end - begin for begin, end in spans.values()]

    def _origin(self, name: str, computation: str | None) -> str:
        """The instruction behind tuples: of several results, or what is left of optimization barriers."""
        by_name = {instruction.name: instruction for instruction in self.computations[computation or self.entry]}
        while (instruction := by_name[name]).opcode == "get-tuple-element":
            found = re.search(r"index=(\d+)", instruction.text)
            assert found is not None
            source = by_name[instruction.operands[0]]
            if source.opcode == "custom-call":
                return source.name
            name = source.operands[int(found[1])]
        return name


def _is_product(instruction: Instruction) -> bool:
    return bool(re.search(r"gemm|__cublas", f"{instruction.name} {instruction.kind}") and instruction.opcode in ("fusion", "custom-call"))


def parse(text: str, conditionals: bool = False) -> Schedule:
    """The schedule in the text of a compiled module."""
    assert "is_scheduled=true" in text.splitlines()[0]
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(,|$)", line):
            operands = tuple(re.findall(r"%([\w.\-]+)", found[3]))
            computations[current].append(Instruction(found[1], found[2], operands, line))
    return Schedule(computations, entry, conditionals)


def compiled(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, *shapes: tuple[int, ...], conditionals: bool = False
) -> Schedule:
    """The schedule of `jit(shard_map(function))` for bfloat16 operands of these global shapes."""
    body = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    specs = jax.tree.leaves(in_specs, is_leaf=lambda spec: isinstance(spec, P))
    operands = [
        jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    text = jax.jit(body).lower(*operands).compile().as_text()
    assert text is not None
    return parse(text, conditionals)
