import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _numpy_seed():
    np.random.seed(0)
