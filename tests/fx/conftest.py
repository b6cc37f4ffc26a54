import pytest

from tests.flow import convert
from tests.models import BATCH, IDS, Tied


@pytest.fixture(scope="module")
def converted():
    """A converted model whose embedding is also its head, for any number of sequences."""
    return convert(Tied(), (IDS,), shapes=BATCH)
