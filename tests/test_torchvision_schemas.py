"""Plain imports of torchvision and of transformers' models, in the environment that `make` makes."""

from types import SimpleNamespace

import pytest
import torch

from tests.fresh_process import run_program
from tests.torchvision_schemas import torchvision_schemas

IMPORTS = {
    "torchvision": "import torchvision",
    "transformers": "from transformers import BertModel",
    "pt2mx": "import pt2mx; pt2mx.extras.import_extra('transformers', 'hf')",
}


@pytest.mark.compiled_except("torchvision")
@pytest.mark.parametrize("first", IMPORTS)
def test_packages_import_whichever_is_first(first, tmp_path):
    program = "\n".join([IMPORTS[first], *IMPORTS.values()])
    finished = run_program(program, "imports.py", tmp_path, [("error",)])
    assert finished.status == 0, f"`make test` installs what lacks, `pt2mx doctor` names it: {finished.err}"


@pytest.mark.parametrize(
    ("cuda_of_torch", "version", "names"),
    [
        (None, "0.28.0+cu130", ["nms", "qnms"]),
        (None, "0.28.0+cpu", []),
        ("13.0", "0.28.0+cu130", []),
        (None, None, []),
    ],
)
def test_schemas_are_declared_for_a_cuda_build_alone(cuda_of_torch, version, names, tmp_path, monkeypatch):
    """A library that loads declares them itself."""
    spec = None if version is None else SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'")
    schemas: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", cuda_of_torch)
    monkeypatch.setattr(torchvision_schemas.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torchvision_schemas, "Library", lambda *_: SimpleNamespace(define=schemas.append))
    monkeypatch.setattr(torchvision_schemas, "_declared", [])
    torchvision_schemas.declare()
    assert [schema.partition("(")[0] for schema in schemas] == names
