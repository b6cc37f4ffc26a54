"""The type checker agrees with the code of the documents, and finds pt2mx's types where it is installed."""

import pytest

from tests.documents import check_types, programs

pytestmark = pytest.mark.slow


def test_code_of_the_documents():
    code = programs()
    assert len(code) > 20
    result = check_types(code)
    assert result.returncode == 0, result.stdout + result.stderr


def test_installed_types_are_found():
    result = check_types({"user": "import pt2mx.fx.lower, pt2mx.pt2e.flow.prepare, pt2mx.configs"})
    assert result.returncode == 0, result.stdout + result.stderr


def test_wrong_calls_are_found():
    calls = "fx.lower_to_inductor(3)\npt2e.prepare_pt2e(3, None)\npt2mx.quantize_mx(5, 'mxfp4')\n"
    result = check_types({"user": f"import pt2mx, pt2mx.fx.lower as fx, pt2mx.pt2e.flow.prepare as pt2e\n{calls}"})
    assert result.stdout.count("[arg-type]") == 3, result.stdout + result.stderr
