"""The faults of `tests.mutations` can be put into the product: each names one place of a file."""

import ast

import pytest

from tests.mutations.faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.path}:{fault.before}")
def test_each_fault_names_one_place(fault: Fault) -> None:
    text = fault.changed()
    if fault.path.endswith(".py"):
        ast.parse(text)
