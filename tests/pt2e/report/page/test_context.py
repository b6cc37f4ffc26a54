import numpy as np
import pytest
import torch

from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.report.page.context import PageContext


def test_the_recipe_to_copy(tmp_path):
    assert PageContext(recipe="mxfp4").recipe_text() == recipe.text("mxfp4")
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight="mxint8"))
    assert PageContext(recipe=quantizer).recipe_text() == "global:\n  weight: mxint8{32}\n"
    file = tmp_path / "own.yaml"
    quantizer.to_recipe(file)
    for path in (file, str(file)):
        context = PageContext(recipe=path)
        assert (context.recipe_name, context.recipe_text()) == (str(file), file.read_text())
    assert PageContext().recipe_text() == ""
    with pytest.raises(MXError, match="no recipe 'mxfp44'"):
        PageContext(recipe="mxfp44").recipe_text()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model", 5, "str"),
        ("recipe", {}, "str or PathLike or MXQuantizer"),
        ("quality", 0.99, "Mapping"),
        ("comparison", [], "RecipeComparison or None"),
        ("sensitivity", "kl", "Sensitivity or None"),
    ],
)
def test_other_objects_are_refused(name, value, allowed):
    with pytest.raises(MXError, match=rf"{name} must be {allowed}, not of type {type(value).__name__}"):
        PageContext(**{name: value})


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5], dtype=torch.bfloat16)])
def test_quality_is_a_number_of_any_library(value):
    assert repr(PageContext(quality={"accuracy": value}).known_quality()) == "{'accuracy': 0.5}"


@pytest.mark.parametrize("value", ["high", None, 10**400, torch.ones(2)])
def test_quality_that_is_no_number_is_refused(value):
    with pytest.raises(MXError, match=r"quality\['accuracy'\] must be a number, not "):
        PageContext(quality={"accuracy": value}).known_quality()
