import json

import pytest

from pt2mx import MXError, MXFormatObserver, MXQuantizationConfig, MXQuantizer, PT2MXConfig

FORMATS = {"": {"weight": "mxfp4_e2m1{32}", "activation": "mxfp8_e4m3{32}"}}


def observed():
    observer = MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8"))
    return MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4", observer=observer))


def test_spellings_of_one_config(tmp_path):
    quantizer = MXQuantizer.from_dict(FORMATS)
    quantizer.to_recipe(tmp_path / "own.yaml")
    for config in (
        PT2MXConfig(weight="mxfp4", activation="mxfp8"),
        PT2MXConfig(FORMATS),
        PT2MXConfig(quantizer),
        PT2MXConfig(tmp_path / "own.yaml"),
        PT2MXConfig(str(tmp_path / "own.yaml")),
    ):
        assert config.recipe == FORMATS
        assert config.quantizer.to_recipe() == quantizer.to_recipe()


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_first_last_mxfp8", "mxint8"])
def test_a_recipe_survives_json(recipe):
    config = PT2MXConfig(recipe, modules_to_not_convert=("lm_head",))
    again = PT2MXConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.quantizer.to_recipe() == MXQuantizer.from_recipe(recipe).to_recipe()
    assert again.modules_to_not_convert == ["lm_head"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either a recipe"),
        ({"recipe": "mxfp4", "weight": "mxfp4"}, "give either a recipe"),
        ({"activation": "mxfp4"}, "give a format of weights"),
        ({"weight": "fp3"}, "weight: "),
        ({"recipe": "mxfp5"}, "no recipe 'mxfp5'"),
        ({"recipe": 4}, "a recipe is a name"),
        ({"recipe": "mxfp4_decoder"}, "which is not applied to weights"),
        ({"recipe": observed()}, "names observers"),
        ({"recipe": MXQuantizer().set_filter_function(lambda node: True)}, "a filter function cannot"),
        ({"recipe": "mxfp4", "quant_method": "awq"}, "is another quantizer's"),
        ({"recipe": "mxfp4", "modules_to_not_convert": "lm_head"}, "='lm_head' must be a list of names"),
        ({"recipe": "mxfp4", "modules_to_not_convert": [3]}, "must be a list of names"),
        ({"recipe": "mxfp4", "modules_to_not_convert": ["["]}, "'\\[' is no regular expression"),
    ],
)
def test_bad_configs(arguments, message):
    with pytest.raises(MXError, match=message):
        PT2MXConfig(**arguments)
