"""The type stub of the extension describes the extension."""

from __future__ import annotations

import ast
import pathlib

from hoccl_jax import _native, runtime


def test_stub_lists_the_functions_of_the_extension() -> None:
    stub = ast.parse((pathlib.Path(runtime.__file__).parent / "_native.pyi").read_text())
    described = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert described == {name for name in dir(_native) if not name.startswith("_") and callable(getattr(_native, name))}
