"""Zero-SM collective communication for JAX: copy engines and NICs move the data, the SMs keep computing."""

from importlib import metadata as _metadata

from hoccl_jax.collectives import all_gather, all_to_all, pbroadcast, ppermute, precv, psend, pshuffle
from hoccl_jax.futures import prefetch_barrier
from hoccl_jax.lax_override import override_lax
from hoccl_jax.partitioning import reshard
from hoccl_jax.runtime import check_errors, init, reset_stats, shutdown, stats, topology

try:
    __version__ = _metadata.version("hoccl-jax")
except _metadata.PackageNotFoundError:  # run from a source tree that isn't installed
    __version__ = "0+source"

__all__ = [
    "all_gather",
    "all_to_all",
    "check_errors",
    "init",
    "override_lax",
    "pbroadcast",
    "ppermute",
    "precv",
    "prefetch_barrier",
    "psend",
    "pshuffle",
    "reset_stats",
    "reshard",
    "shutdown",
    "stats",
    "topology",
]
