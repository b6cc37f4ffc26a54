import pytest

from tests.stage_models import stages


@pytest.fixture(scope="module")
def net():
    return stages()
