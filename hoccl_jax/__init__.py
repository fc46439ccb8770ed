"""Zero-SM collective communication for JAX: copy engines and NICs move the data, the SMs keep computing."""

from importlib import metadata as _metadata

from hoccl_jax.collectives import all_gather, all_to_all, pbroadcast, ppermute, precv, psend, pshuffle
from hoccl_jax.exchange import Flow, exchange
from hoccl_jax.futures import (
    Future,
    all_gather_start,
    all_to_all_start,
    overlap,
    pbroadcast_start,
    ppermute_start,
    precv_start,
    prefetch_barrier,
    psend_start,
    pshuffle_start,
)
from hoccl_jax.lax_override import override_lax
from hoccl_jax.mpmd import recv, send
from hoccl_jax.partitioning import reshard
from hoccl_jax.ragged import ragged_all_to_all
from hoccl_jax.runtime import check_errors, foreground, init, reset_stats, shutdown, stats, topology, trace

try:
    __version__ = _metadata.version("hoccl-jax")
except _metadata.PackageNotFoundError:  # run from a source tree that isn't installed
    __version__ = "0+source"

__all__ = [
    "Flow",
    "Future",
    "all_gather",
    "all_gather_start",
    "all_to_all",
    "all_to_all_start",
    "check_errors",
    "exchange",
    "foreground",
    "init",
    "overlap",
    "override_lax",
    "pbroadcast",
    "pbroadcast_start",
    "ppermute",
    "ppermute_start",
    "precv",
    "precv_start",
    "prefetch_barrier",
    "psend",
    "psend_start",
    "pshuffle",
    "pshuffle_start",
    "ragged_all_to_all",
    "recv",
    "reset_stats",
    "reshard",
    "send",
    "shutdown",
    "stats",
    "topology",
    "trace",
]
