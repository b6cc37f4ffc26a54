import pytest

from tests.flow import convert
from tests.models import BATCH, IDS, Tied


@pytest.fixture(scope="module")
def converted():
    """A model with an embedding that is the head too, of any number of sequences."""
    return convert(Tied(), (IDS,), shapes=BATCH)
