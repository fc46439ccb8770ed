"""Runs the collectives of `jax.lax` in unchanged programs on hoccl_jax.

The switch acts where JAX lowers a primitive: tracing, types, differentiation and batching are untouched. It is part of the key of JAX's
caches, so what was compiled on one side of it never serves on the other.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import config as jax_config
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.mesh import Mesh
from jax.extend.core import Primitive

from hoccl_jax import primitives, ragged, runtime
from hoccl_jax.config import Config

_active = jax_config.config_ext.Config[bool]("hoccl_override_lax", False, include_in_jit_key=True, include_in_trace_context=True)


@contextlib.contextmanager
def override_lax(enable: bool = True) -> Iterator[None]:
    """Within it, programs that this thread compiles run jax.lax's collectives on hoccl_jax; with `enable=False`, as JAX runs them.

    The collectives: all_gather (with any `to`), all_to_all, ragged_all_to_all, ppermute, pshuffle and pbroadcast, also where a
    transposition makes them, psend and precv, on CPU and CUDA devices. Reductions, JAX's internal asynchronous forms, other platforms, and
    programs over an abstract mesh or with symbolic shapes stay JAX's own; `hoccl_jax.stats()["fallbacks"]` counts the call sites of the
    last two kinds.

    Programs compiled within the context and outside it live side by side: entering and leaving recompiles nothing.
    HOCCL_OVERRIDE_LAX=1, set before hoccl_jax is imported, is a context around the whole process. HOCCL_DISABLE=1 wins over both.

    RuntimeError inside functions that JAX traces: they are compiled when the context is over, or were already.
    """
    if not core.trace_state_clean():
        raise RuntimeError(
            "hoccl_jax.override_lax() inside a function that JAX traces, which is compiled only later: use it around the outermost call"
            " (as a decorator: above jax.jit), or call hoccl_jax's own functions inside"
        )
    _install()
    before = _active.swap_local(enable)
    try:
        yield
    finally:
        _active.set_local(before)


def _unsupported(ctx: Any) -> str | None:
    """Why JAX must lower this call itself; None: there is no reason."""
    if not isinstance(getattr(ctx.module_context.axis_context, "mesh", None), Mesh):
        return "lowered for an abstract mesh"
    if not all(core.is_constant_shape(getattr(aval, "shape", ())) for aval in (*ctx.avals_in, *ctx.avals_out)):
        return "symbolic shapes"
    return None


def _rule(name: str, ours: Callable[..., Any], platform: str, theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        reason = None
        config = Config.from_env()
        if _active.value and not config.disable:
            reason = _unsupported(ctx)
            if reason is None:
                options = primitives.Options("foreground", config.overlap)
                return ours(ctx, *operands, options=options, **params)
        if theirs is None:
            raise NotImplementedError(f"MLIR translation rule for primitive '{name}' not found for platform {platform}")
        if reason is not None:
            runtime.count_fallback(name, reason)
        return theirs(ctx, *operands, **params)

    return rule


@functools.cache
def _install() -> None:
    for collective in primitives.COLLECTIVES:
        for platform in primitives.PLATFORMS:
            # Sends and receives are numbered as they are lowered, so two equal ones must not share a lowering.
            _register(collective.twin, functools.partial(primitives.lower, collective, platform), platform, not collective.one_sided)
    for platform in primitives.PLATFORMS:
        _register(ragged.TWIN, functools.partial(ragged.lower, platform), platform, True)


def _register(twin: Primitive, ours: Callable[..., Any], platform: str, cacheable: bool) -> None:
    theirs = mlir._platform_specific_lowerings[platform].get(twin) or mlir._lowerings.get(twin)
    rule = _rule(twin.name, ours, platform, theirs.rule if theirs else None)
    mlir.register_lowering(twin, rule, platform=platform, inline=theirs.inline if theirs else True, cacheable=cacheable)


_VARIABLE = "HOCCL_OVERRIDE_LAX"
if Config.from_env({_VARIABLE: os.environ.get(_VARIABLE, "")}).override_lax:
    _install()
    _active.set_global(True)
