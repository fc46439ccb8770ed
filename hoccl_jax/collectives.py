"""The collectives for use inside `jax.shard_map` (or `jax.vmap` with an axis name).

Each function is its namesake of `jax.lax` with the data moved by hoccl_jax: same arguments, defaults, pytrees, types, transformations and
errors, bit for bit the same results. There are two arguments more:

- `priority`: "foreground" (default) where the program waits for the result soon; "background" for transfers far ahead of their use, which
  give way to foreground operations, chunk by chunk.
- `overlap`: on GPUs, does XLA run the operation beside computation that does not depend on it (on a stream of its own), or in the order of
  the program's other kernels? Default: HOCCL_OVERLAP, which is on. How far ahead XLA starts an operation is bounded by
  `hoccl_jax.prefetch_barrier`. psend and precv always keep their place among the kernels. Without effect on CPU devices, where independent
  operations overlap in any case.

With HOCCL_DISABLE=1 each function is its namesake and the two are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from jax._src.lax import parallel

from hoccl_jax import primitives
from hoccl_jax.config import Config

Priority = Literal["foreground", "background"]
AxisName = Any  # a hashable, or a tuple of them where several axes act as one


def _run(function: Callable[..., Any], priority: str, overlap: bool | None, *args: Any, **kwargs: Any) -> Any:
    options = checked_options(priority, overlap)
    if Config.from_env().disable:
        return function(*args, **kwargs)
    return primitives.redirected(function, options, *args, **kwargs)


def checked_options(priority: str, overlap: bool | None) -> primitives.Options:
    """The options that these arguments stand for. Raises ValueError for others."""
    if not isinstance(priority, str) or priority not in primitives.PRIORITIES:
        raise ValueError(f"priority must be one of {', '.join(primitives.PRIORITIES)}, got {priority!r}")
    if overlap is not None and not isinstance(overlap, bool):
        raise ValueError(f"overlap must be True, False or None (as HOCCL_OVERLAP says), got {overlap!r}")
    return primitives.Options(priority, Config.from_env().overlap if overlap is None else overlap)


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: Literal["varying", "reduced", "invarying"] = "varying",
    priority: Priority = "foreground",
    overlap: bool | None = None,
) -> Any:
    """Gathers the values of all ranks of a group, in rank order, on each of them.

    Args:
      x: array of shape [..., n, ...], or a pytree of arrays.
      axis_name: mesh axis, or tuple of axes, over which to gather.
      axis_index_groups: groups of equal size that cover all indices of the axis once; default one group.
      axis: dimension of the result along which the ranks' values lie.
      tiled: concatenate along the existing dimension `axis` (its size becomes ranks x n) instead of stacking along a new one (size ranks).
      to: type of the result under check_vma, as in jax.lax.all_gather.
      priority: see the module's text.
      overlap: see the module's text.

    Its transpose is jax.lax.psum_scatter.
    """
    return _run(parallel.all_gather, priority, overlap, x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    tiled: bool = False,
    priority: Priority = "foreground",
    overlap: bool | None = None,
) -> Any:
    """Cuts dimension `split_axis` into as many blocks as the group has ranks, sends block r to rank r and joins what comes, in rank order.

    Args:
      x: array, or a pytree of arrays. Untiled, `x.shape[split_axis]` is the number of ranks; tiled, a multiple of it.
      axis_name: mesh axis, or tuple of axes.
      split_axis: dimension of x that is cut. Untiled, it vanishes; tiled, its size is divided by the number of ranks.
      concat_axis: dimension of the result along which the blocks are joined. Untiled, it is new; tiled, its size is multiplied.
      axis_index_groups: as for `all_gather`.
      tiled: see above.
      priority: see the module's text.
      overlap: see the module's text.

    Its transpose is all_to_all with the two dimensions exchanged.
    """
    return _run(
        parallel.all_to_all, priority, overlap, x, axis_name, split_axis, concat_axis, axis_index_groups=axis_index_groups, tiled=tiled
    )


def ppermute(
    x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, priority: Priority = "foreground", overlap: bool | None = None
) -> Any:
    """Sends x of each source to its destination. Ranks that are no destination get zeros.

    Args:
      x: array, or a pytree of arrays.
      axis_name: mesh axis, or tuple of axes.
      perm: (source, destination) pairs of indices into the axis; no source and no destination twice. Negative ones count from the end.
      priority: see the module's text.
      overlap: see the module's text.

    When it is lowered, whatever the size of the group, raises IndexError for an index outside the group, ValueError for one that occurs
    twice, TypeError for one that is no integer. So do `psend` and `precv`, and `pbroadcast` for its source.

    Its transpose is ppermute with the pairs reversed.
    """
    return _run(parallel.ppermute, priority, overlap, x, axis_name, perm)


def pshuffle(x: Any, axis_name: AxisName, perm: Sequence[int], *, priority: Priority = "foreground", overlap: bool | None = None) -> Any:
    """`ppermute` in another notation: the result at index i is x of index `perm[i]`. `perm` is a permutation of all indices."""
    return _run(parallel.pshuffle, priority, overlap, x, axis_name, perm)


def pbroadcast(x: Any, axis_name: AxisName, source: int, *, priority: Priority = "foreground", overlap: bool | None = None) -> Any:
    """Gives each rank the x of the rank with index `source`. x may be a pytree. (jax.lax.pbroadcast itself lacks CPU devices.)"""
    return _run(parallel.pbroadcast, priority, overlap, x, primitives.axis_names(axis_name), source)


def psend(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, priority: Priority = "foreground") -> Any:
    """Sends x of each source of `perm` to its destination, which takes it with `precv`.

    Sends and receives of one program meet in the order in which they are traced: the k-th `precv` takes the k-th `psend` of the same shape,
    type, axes and `perm`, whose order counts. Both are needed on every rank; there is no vmap and no differentiation. A message that nobody
    receives stays in memory. A function within jax.jit or jax.checkpoint of its own that is called several times counts once, so it should
    hold both or neither; where its sends and receives can't be told apart any more, NotImplementedError says so.

    Returns a token, which `precv` and jax.lax.optimization_barrier accept. (jax.lax.psend itself lacks CPU devices.)
    """
    return _run(parallel.psend, priority, False, x, axis_name, perm)


def precv(token: Any, out_shape: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, priority: Priority = "foreground") -> Any:
    """Receives what a `psend` of the same `axis_name` and `perm` sends; zeros on ranks that are no destination. Under check_vma the
    result varies over `axis_name`.

    Args:
      token: of the psend, or any other token that orders it; one, not a pytree.
      out_shape: jax.ShapeDtypeStruct of the result.
      axis_name: as for psend.
      perm: as for psend.
      priority: see the module's text.

    A receive without a psend ends with an error after HOCCL_TIMEOUT_S. TypeError: token is none. ValueError: the token is of a psend over
    the same `axis_name` and `perm` but of another shape or type, and no `psend` of the expected ones is left to be received.
    """
    primitives.check_tokens("precv", token)
    return primitives.received(_run(parallel.precv, priority, False, token, out_shape, axis_name, perm), axis_name)
