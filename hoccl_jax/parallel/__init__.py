"""Training over many devices, built on the collectives: fully sharded layers (`fsdp`) and pipelines of stages (`pipeline`).

Both work inside `jax.shard_map`, for any function of (parameters, activations), and know nothing of the model.
"""

from hoccl_jax.parallel import fsdp, pipeline

__all__ = ["fsdp", "pipeline"]
