"""These tests compile for GPUs that are not there and read XLA's schedule. They need jax's CUDA plugin (`make aot-test` installs it)."""

import importlib.util
import os

collect_ignore_glob = []
if importlib.util.find_spec("jax_cuda13_plugin"):
    # Before jax loads its plugins: this one wants to see a GPU otherwise.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
else:
    collect_ignore_glob.append("test_*.py")
