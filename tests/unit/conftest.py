"""Unit tests run on eight CPU devices of one process, whatever else the machine has."""

import os

import jax

# Most of the time goes into compiling programs that run once. LLVM need not optimise them, which saves a quarter of the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
