"""Pytrees in two parts: the leaves that have a gradient, and those that have none (integers, booleans, random keys)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def split(tree: Any, like: Any = None) -> tuple[Any, Any]:
    """Two trees: `tree` with None for each leaf that has no gradient, and with None for each other one. `like` says which are which."""
    differs = jax.tree.map(lambda leaf: jnp.issubdtype(jnp.result_type(leaf), jnp.inexact), tree if like is None else like)
    one = jax.tree.map(lambda differentiable, leaf: leaf if differentiable else None, differs, tree)
    other = jax.tree.map(lambda differentiable, leaf: None if differentiable else leaf, differs, tree)
    return one, other


def part(tree: Any, like: Any = None) -> Any:
    """The first of the two: the leaves that have a gradient."""
    return split(tree, like)[0]


def merge(one: Any, other: Any) -> Any:
    """The tree that `split` has taken apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)
