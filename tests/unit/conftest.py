"""Unit tests run on eight CPU devices of one process, whatever else the machine has."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
