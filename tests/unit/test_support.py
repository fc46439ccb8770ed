"""The page that says what works with what is true."""

from __future__ import annotations

import pytest

from tests import support


@pytest.mark.parametrize("name", support.OPERATIONS)
def test_the_page_is_up_to_date(name: str) -> None:
    assert support.row(name) in support.PAGE.read_text().splitlines(), "run python -m tests.support"


def test_the_page_has_this_head() -> None:
    assert support.PAGE.read_text().startswith(support.HEAD), "run python -m tests.support"


def test_the_page_has_these_columns_and_operations() -> None:
    lines = [line.strip("| ").split(" | ") for line in support.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert lines[0] == ["operation", *support.TRANSFORMS, *support.AXES, "CUDA"]
    assert [line[0] for line in lines[1:]] == list(support.OPERATIONS)
