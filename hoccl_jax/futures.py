"""Order between transfers and computation: the barrier that bounds how far ahead a transfer starts."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.interpreters import ad, batching, mlir
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive


def prefetch_barrier(operands: Any, after: Any) -> tuple[Any, Any]:
    """Bounds a prefetch: what uses the returned `operands` starts no earlier than `after` has been computed.

    XLA starts independent transfers as early as it can, up to a whole network ahead, and keeps all their results. In

        shard, x = hoccl_jax.prefetch_barrier(shard, x)
        ahead = hoccl_jax.all_gather(shard, "fsdp", tiled=True)  # the parameters of the next layer
        x = layer(x, weights)                                    # this layer

    the gather starts when x, the input of this layer, is there, and runs while the layer computes. The barrier orders, and moves nothing.
    In the backward pass it does the same for the transfers of gradients.

    Args:
      operands: pytree of arrays, the operands of the transfers.
      after: pytree of arrays, computed before and used after.

    Returns:
      (operands, after), to be used in place of the arguments.
    """
    return barrier((operands, after))


def barrier(tree: Any) -> Any:
    """jax.lax.optimization_barrier, but for two things that differ between versions of jax: values keep their types under check_vma, and
    cotangents that are zero stay symbolic."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _barrier_p.bind(*leaves))


_barrier_p = Primitive("hoccl_barrier")
_barrier_p.multiple_results = True
_barrier_p.def_impl(lambda *values: jax.lax.optimization_barrier(values))
_barrier_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(_barrier_p, lambda ctx, *values: hlo.OptimizationBarrierOp(values).results)
batching.primitive_batchers[_barrier_p] = lambda operands, dims: (_barrier_p.bind(*operands), dims)


def _bind_nonzero(values: Any) -> list[Any]:
    """Binds what is not a symbolic zero."""
    present = [not isinstance(value, ad.Zero) for value in values]
    bound = iter(_barrier_p.bind(*(value for value, there in zip(values, present, strict=True) if there)) if any(present) else ())
    return [next(bound) if there else value for value, there in zip(values, present, strict=True)]


def _barrier_jvp(primals: Any, tangents: Any) -> Any:
    return _barrier_p.bind(*primals), _bind_nonzero(tangents)


def _barrier_transpose(cotangents: Any, *_primals: Any) -> Any:
    return _bind_nonzero(cotangents)


ad.primitive_jvps[_barrier_p] = _barrier_jvp
ad.primitive_transposes[_barrier_p] = _barrier_transpose
