"""hoccl_jax equals jax.lax, bit for bit, in random cases over everything that can vary."""

import jax
import pytest

from tests import cases


@pytest.mark.parametrize("case", list(cases.generate(8, seed=0, count=560)), ids=str)
def test_equals_jax_lax(case: cases.Case) -> None:
    cases.check(case, jax.devices())
