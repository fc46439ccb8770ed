"""The prediction for GPUs of one host: its traffic is the operation's, and no order beats the bound."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import nvswitch

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize("operation", nvswitch.OPERATIONS)
def test_operands_have_the_size_that_is_asked_for(operation: str) -> None:
    sent = nvswitch.bytes_between(operation, 1 << 20, 8).sum(axis=1)
    copies = 8 if operation == "all_gather" else 1
    np.testing.assert_allclose(sent, copies << 20, rtol=1e-4)


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown operation 'reduce'"):
        nvswitch.bytes_between("reduce", 1, 2)


@pytest.mark.parametrize("operation", nvswitch.OPERATIONS)
@pytest.mark.parametrize("gpus", [2, 8])
def test_no_order_is_faster_than_the_busiest_link(operation: str, gpus: int) -> None:
    for size in (64 << 10, 64 << 20):
        found = nvswitch.predict(operation, size, gpus)
        assert 0 < found.bound < min(found.direct, found.rotation, found.scheduled)
        assert found.direct <= found.rotation  # steps that all take together only add to it
        assert found.scheduled <= 1.1 * found.direct  # what a copy of each 4 MiB costs
