import re

import pytest

from pt2mx import MXError, MXSpec
from pt2mx.pt2e.checkpoints import modelopt_config
from pt2mx.pt2e.checkpoints.configs import read_config, write_config
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.module_schemes import Module, Scheme

EVEN4, EVEN6 = MXSpec("fp4_e2m1", scale_mode="even"), MXSpec("fp6_e2m3", scale_mode="even")
RCEIL8 = MXSpec("fp8_e4m3", scale_mode="rceil")
_MX = {"type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}


def group(bits, *targets, inputs=None, **fields):
    dynamic = {**_MX, "num_bits": inputs, "dynamic": True}
    return {
        "targets": list(targets),
        "weights": {**_MX, "num_bits": bits},
        "input_activations": inputs and dynamic,
        **fields,
    }


MODULES = {
    "embed": Module("Embedding", None),
    "layers.0.q": Module("Linear", Scheme("fp4_e2m1", EVEN4)),
    "layers.0.k": Module("Linear", Scheme("fp4_e2m1", EVEN4)),
    "layers.0.v": Module("Linear", Scheme("fp6_e2m3", EVEN6)),
    "layers.0.mlp.experts": Module("Experts", Scheme("fp4_e2m1")),
    "layers.0.mlp.gate": Module("TopKRouter", None),
    "head": Module("Linear", None),
}


def test_compressed_tensors_writes_a_group_a_scheme():
    config = write_config(LAYOUTS["compressed-tensors"], MODULES)
    assert config["format"] == "mixed-precision" and config["ignore"] == ["layers.0.mlp.gate", "head"]
    assert [one["targets"] for one in config["config_groups"].values()] == [
        ["Linear"], ["layers.0.v"], [r"re:.*\.experts\..*"],
    ]  # fmt: skip
    schemes = read_config(config)
    for name, module in MODULES.items():
        asked = f"{name}.0.w1" if module.kind == "Experts" else name
        assert schemes.of(asked, "Linear" if module.kind == "Experts" else module.kind) == module.scheme


def test_compressed_tensors_reads_names_before_patterns_before_classes():
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": group(4, "Linear", format="mxfp4-pack-quantized"),
            "group_1": group(6, r"re:.*mlp\.", inputs=6, format="mxfp6-pack-quantized"),
            "group_2": group(8, "layers.1.mlp.up", "Embedding", inputs=8, format="mxfp8-quantized"),
        },
        "ignore": ["lm_head", "re:.*gate$"],
    }
    of = read_config(config).of
    assert of("layers.0.q") == Scheme("fp4_e2m1")
    assert of("layers.0.mlp.up") == Scheme("fp6_e2m3", EVEN6)
    assert of("layers.1.mlp.up") == of("embed", "Embedding") == Scheme("fp8_e4m3", RCEIL8)
    assert of("lm_head") is of("layers.0.mlp.gate") is of("norm", "RMSNorm") is None


def test_quark():
    modules = {**MODULES, "layers.0.v": Module("Linear", Scheme("fp6_e3m2", MXSpec("fp6_e3m2", scale_mode="ceil")))}
    config = write_config(LAYOUTS["quark"], modules)
    assert config["global_quant_config"]["weight"]["dtype"] == "fp4" and config["exclude"][-1] == "head"
    assert config["layer_quant_config"]["layers.0.v"]["input_tensors"]["scale_calculation_mode"] == "ceil"
    schemes = read_config(config)
    assert all(schemes.of(name) == module.scheme for name, module in modules.items() if module.kind != "Embedding")
    tensor = {"dtype": "mx", "mx_element_dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1,
              "scale_format": "e8m0", "is_dynamic": False}  # fmt: skip
    old = {"quant_method": "quark", "exclude": ["*head", "re:.*gate"], "global_quant_config": {"weight": tensor}}
    of = read_config(old).of
    assert of("lm_head") is of("mlp.gate") is None and of("layers.0.q") == Scheme("fp4_e2m1")


def test_modelopt_and_fp8_and_gpt_oss():
    modules = {name: Module("Linear", Scheme("fp8_e4m3", RCEIL8)) for name in "ab"} | {"head": Module("Linear", None)}
    config = write_config(LAYOUTS["modelopt"], modules)
    for one in (config, {"quant_method": "modelopt", **modelopt_config.file_of(config)}):
        schemes = read_config(one)
        assert schemes.of("a") == Scheme("fp8_e4m3", RCEIL8) and schemes.of("head") is None
    modules = {"a": Module("Linear", Scheme("fp8_e4m3")), "e": Module("Embedding", None)}
    config = write_config(LAYOUTS["fp8"], {**modules, "model.head": Module("Linear", None)})
    assert config["weight_block_size"] == [1, 32] and config["modules_to_not_convert"] == ["model.head"]
    for method in ("fp8", "mxfp8"):
        of = read_config({**config, "quant_method": method}).of
        assert of("a") == Scheme("fp8_e4m3") and of("model.head") is None
    experts = {"mlp.experts": Module("Experts", Scheme("fp4_e2m1")), "q": Module("Linear", None)}
    config = write_config(LAYOUTS["mxfp4"], experts)
    assert config == {"quant_method": "mxfp4", "modules_to_not_convert": ["q"]}
    assert read_config(config).of("mlp.experts.down_proj", "Experts") == Scheme("fp4_e2m1")
    assert read_config(config).of("q") is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' of the checkpoint is none of compressed-tensors"),
        ({}, "quant_method None"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": {"g": group(4, "Linear", format="nvfp4-pack-quantized")}}, "'nvfp4-pack-quantized', and"),
        ({"config_groups": {"g": group(5, "Linear")}}, "weights of g in config_groups are not MX, but have 5"),
        ({"config_groups": {"g": group(4, "Linear", output_activations=_MX)}}, "g of config_groups quantizes outputs"),
        ({"config_groups": {"g": group(4, "Linear", weights={**_MX, "num_bits": 4, "type": "int"})}}, "type 'int'"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "dtype 'int4', qscheme None"),
        ({"quant_method": "quark", "export": {"weight_format": "fake"}}, "weight_format 'fake'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "'NVFP4' of the checkpoint in groups"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "'INT4_AWQ' of the checkpoint in groups of None: exp"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "has no quantized_layers"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers":
          {"l.q": {"quant_algo": "W4A8_AWQ", "group_size": 128}}}, "'W4A8_AWQ' of l.q in groups of 128"),
        ({"quant_method": "quark", "algo_config": [{"name": "rotation", "r3": True}]}, "rotates inputs (r3 of"),
        ({"config_groups": {"MXFP4": ["Linear"]}}, "could not read the quantization_config of compressed-tensors"),
        ({"ignore": ["re:["]}, "quantization_config of compressed-tensors: error: unterminated character set"),
        ({"quant_method": "quark"}, "could not read the quantization_config of quark: KeyError: 'global_quant_config'"),
        ({"quant_method": "quark", "exclude": ["re:["]}, "quantization_config of quark: error: unterminated"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["["]}, "quantization_config of fp8: error: unterminated"),
    ],
)  # fmt: skip
def test_what_is_not_mx(config, text):
    with pytest.raises(MXError, match=re.escape(text)):
        read_config({"quant_method": "compressed-tensors", **config} if config else {})


def test_names_that_readers_confuse():
    modules = {"heads.1": Module("Linear", None), "heads.10": Module("Linear", Scheme("fp8_e4m3"))}
    with pytest.raises(MXError, match=r"would not tell heads\.10 from another module"):
        write_config(LAYOUTS["fp8"], modules)
    assert write_config(LAYOUTS["quark"], modules)["exclude"] == ["heads.1"]
