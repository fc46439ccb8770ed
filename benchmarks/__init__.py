"""Benchmarks of hoccl_jax against jax.lax: `python -m benchmarks.cpu` for CPU devices."""
