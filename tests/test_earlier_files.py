"""Files of earlier versions (`earlier/files`), of each kind that pt2mx writes, hold the same today."""

import json

import pytest
import torch

from tests.earlier.read import FILES, paths, results_of

RESULTS = json.loads((FILES.parent / "results.json").read_text())


def test_each_file_has_results():
    assert sorted(RESULTS) == [path.name for path in paths()]


@pytest.mark.compiled_cases("checkpoint_gguf.gguf", "checkpoint_modelopt", "checkpoint_quark", "language_decoder")
@pytest.mark.filterwarnings("ignore:.*was saved by pt2mx.*")
@pytest.mark.parametrize("path", paths(), ids=lambda path: path.name)
def test_a_file_of_an_earlier_version(path):
    found, expected = results_of(path), RESULTS[path.name]
    output = expected.pop("output", None)
    if output is not None:
        torch.testing.assert_close(found.pop("output"), output, atol=2e-3, rtol=1e-3)
    assert found == expected
