import jsonschema
import pytest
import yaml

from pt2mx import MXError
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.recipe_schema import recipe_schema

VALIDATOR = jsonschema.Draft202012Validator(recipe_schema())


def errors(text):
    return list(VALIDATOR.iter_errors(yaml.safe_load(text)))


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("name", recipe.names())
def test_shipped_recipes_fit(name):
    assert not errors(recipe.text(name))


def test_a_recipe_of_every_setting_fits(tmp_path):
    text = """
description: all
global: {weight: mxfp4, activation: {element: fp4_e2m1, block_size: 16, scale_mode: even}, operands: {value: null}}
module_name: {a.b: null}
module_name_regex: {".*": {weight: mxfp8, ste: clipped, value_blocks: key_length}}
module_type: {torch.nn.Linear: {weight: mxint8}}
operator_type: {aten.linear: {weight: mxfp8, output: mxfp8, bias: mxfp8, gradient: mxfp4, gradient_hadamard: 32}}
module_name_object_type_order: [[a, aten.matmul, 0, null]]
algorithms: {gptq: {damping: 0.1}, rotation: {online: false, size: null}}
kv_cache: mxfp8
"""
    (tmp_path / "r.yaml").write_text(text)
    recipe.read(tmp_path / "r.yaml")
    assert not errors(text)


@pytest.mark.parametrize(
    "text",
    [
        "description: nothing",
        "global: {weights: mxfp4}",
        "globl: {weight: mxfp4}",
        "global: {weight: {block_size: 16}}",
        "global: {weight: {element: fp4_e2m1, block_size: 0}}",
        "global: {weight: {element: fp4_e2m1, scale_mode: flor}}",
        "global: {weight: mxfp4, ste: clip}",
        "global: {weight: mxfp4, operands: {valu: mxfp8}}",
        "global: {weight: mxfp4}\nalgorithms: fastest",
        "global: {weight: mxfp4}\nalgorithms: {gptq: {damping: -1}}",
        "global: {weight: mxfp4}\nalgorithms: {gptq: {dampin: 1}}",
        "module_name_object_type_order: [[a, b, null]]",
        "module_name: mxfp4",
    ],
)
def test_the_schema_rejects_the_same_texts_as_the_parser(text, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(MXError):
        recipe.read(tmp_path / "r.yaml")
    assert errors(text)
