"""How to get an array from one sharding to another: the cheapest sequence of steps within a shard_map over the whole mesh.

A **layout** says, for each dimension of an array, along which mesh axes it is cut, major axis first; axes of size 1 are left out. Pure
functions of shapes; `partitioning` runs what they find.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Layout = tuple[tuple[str, ...], ...]
Sizes = tuple[tuple[str, int], ...]  # axes of the mesh in its order, without those of size 1

# A collective costs about as much as this many bytes more would: it is what keeps small arrays from many small steps.
_STEP_BYTES = 1 << 20
_LARGEST_SEARCH = 20_000  # layouts looked at


@dataclasses.dataclass(frozen=True)
class Step:
    """`kind`: "slice" (cut dimension `dim` along the further axes `axes`: local), "all_gather" (the reverse), "all_to_all" (the minor axes
    `axes` of `dim` go to `to_dim`) or "ppermute" (`pairs` of ranks over all axes of the mesh)."""

    kind: str
    axes: tuple[str, ...] = ()
    dim: int = -1
    to_dim: int = -1
    pairs: tuple[tuple[int, int], ...] = ()


def fits(shape: Sequence[int], layout: Layout, sizes: Sizes) -> bool:
    """Do all devices get equal shards?"""
    return all(size % count == 0 for size, count in zip(shape, _counts(layout, dict(sizes)), strict=True))


def shard_after(shard: Sequence[int], steps: Sequence[Step], sizes: Sizes) -> tuple[int, ...]:
    """The shape of a shard after these steps."""
    shape, size_of = list(shard), dict(sizes)
    for step in steps:
        count = math.prod(size_of[axis] for axis in step.axes)
        if step.kind == "slice":
            shape[step.dim] //= count
        elif step.kind == "all_gather":
            shape[step.dim] *= count
        elif step.kind == "all_to_all":
            shape[step.dim] *= count
            shape[step.to_dim] //= count
    return tuple(shape)


@functools.lru_cache(maxsize=4096)
def plan(shape: tuple[int, ...], item_bytes: int, sizes: Sizes, source: Layout, target: Layout) -> tuple[Step, ...] | None:
    """The cheapest sequence by bytes received; among equals, by memory. None: the search is too large. Both layouts fit the shape."""
    size_of = dict(sizes)
    array_bytes = math.prod(shape) * item_bytes

    def shard_bytes(layout: Layout) -> int:
        return array_bytes // math.prod(_counts(layout, size_of))

    # Dijkstra's algorithm. The counter keeps the heap from comparing steps.
    counter = itertools.count()
    heap: list[tuple[int, int, int, Layout, tuple[tuple[Step, Layout], ...]]] = [(0, 0, 0, source, ())]
    done: set[Layout] = set()
    while heap and len(done) < _LARGEST_SEARCH:
        cost, memory, _, layout, steps = heapq.heappop(heap)
        if layout == target:
            return _with_pairs(source, steps, sizes)
        if layout in done:
            continue
        done.add(layout)
        before = shard_bytes(layout)
        for step, after in _steps(layout, target, sizes):
            if after in done or not fits(shape, after, sizes):
                continue
            received = {"slice": 0, "all_gather": shard_bytes(after) - before, "ppermute": before}.get(step.kind)
            if received is None:  # an all_to_all keeps one block of its shard
                received = before - before // math.prod(size_of[axis] for axis in step.axes)
            latency = 0 if step.kind == "slice" else _STEP_BYTES
            entry = (cost + received + latency, memory + shard_bytes(after), next(counter), after, (*steps, (step, after)))
            heapq.heappush(heap, entry)
    return None


def _counts(layout: Layout, size_of: dict[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(size_of[axis] for axis in axes) for axes in layout)


def _steps(layout: Layout, target: Layout, sizes: Sizes) -> Iterator[tuple[Step, Layout]]:
    used = {axis for axes in layout for axis in axes}
    for dim, axes in enumerate(layout):
        for name, _ in sizes:
            if name not in used:
                yield Step("slice", (name,), dim), _replaced(layout, {dim: (*axes, name)})
        for first in range(len(axes)):
            kept, moved = axes[:first], axes[first:]
            yield Step("all_gather", moved, dim), _replaced(layout, {dim: kept})
            for to_dim, others in enumerate(layout):
                if to_dim != dim:
                    yield Step("all_to_all", moved, dim, to_dim), _replaced(layout, {dim: kept, to_dim: (*others, *moved)})
    for after in _permuted(layout, target, sizes):
        yield Step("ppermute"), after


def _with_pairs(source: Layout, path: Sequence[tuple[Step, Layout]], sizes: Sizes) -> tuple[Step, ...]:
    """The steps of a path; only here do permutations learn who sends to whom."""
    steps, layout = [], source
    for step, after in path:
        if step.kind == "ppermute":
            step = dataclasses.replace(step, pairs=matched(blocks(layout, sizes), blocks(after, sizes)))
        steps.append(step)
        layout = after
    return tuple(steps)


def _replaced(layout: Layout, changes: dict[int, tuple[str, ...]]) -> Layout:
    return tuple(changes.get(dim, axes) for dim, axes in enumerate(layout))


def _permuted(layout: Layout, target: Layout, sizes: Sizes) -> Iterator[Layout]:
    """Layouts with the same blocks on other devices: the target, axes of a dimension in another order, one axis in another's place."""
    size_of = dict(sizes)
    counts = _counts(layout, size_of)
    if target != layout and _counts(target, size_of) == counts:
        yield target
    for dim, axes in enumerate(layout):
        for order in itertools.permutations(axes):
            if order != axes:
                yield _replaced(layout, {dim: order})
    for one, other in itertools.combinations([name for name, _ in sizes], 2):
        if size_of[one] == size_of[other]:
            swap = {one: other, other: one}
            after = tuple(tuple(swap.get(axis, axis) for axis in axes) for axes in layout)
            if after != layout:
                yield after


def matched(has: np.ndarray, wants: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(source, destination) ranks that give each rank the block that it wants: from itself if it has it, else from the next that is free.

    `has` and `wants` hold the number of a block for each rank, each block equally often.
    """
    keeps = has == wants
    pairs = [(rank, rank) for rank in np.flatnonzero(keeps).tolist()]
    free = sorted((has[rank], rank) for rank in np.flatnonzero(~keeps).tolist())
    needy = sorted((wants[rank], rank) for rank in np.flatnonzero(~keeps).tolist())
    pairs += [(src, dst) for (_, src), (_, dst) in zip(free, needy, strict=True)]
    return tuple(sorted(pairs))


def blocks(layout: Layout, sizes: Sizes) -> np.ndarray:
    """The number of the block of each rank, in the order of the mesh."""
    shape = [size for _, size in sizes]
    index = dict(zip([name for name, _ in sizes], np.indices(shape).reshape(len(sizes), -1), strict=True))
    size_of = dict(sizes)
    block = np.zeros(math.prod(shape), np.int64)
    for axes in layout:
        for axis in axes:
            block = block * size_of[axis] + index[axis]
    return block
