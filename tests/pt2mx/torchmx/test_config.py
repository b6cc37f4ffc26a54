import pytest

import pt2mx
from pt2mx import MXConfig, MXError, QAttentionConfig, QLinearConfig
from pt2mx.torchmx.dtypes import dtype_of

FP8, FP6, FP4 = MXConfig("float8_e4m3"), MXConfig("float6_e3m2", 16), MXConfig("float4_e2m1", block_size=64)
LINEAR = QLinearConfig(weights_config=FP6, activations_config=FP8)
ATTENTION = QAttentionConfig(LINEAR, FP8, FP8, FP4, FP6)


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("float8_e4m3", "fp8_e4m3"),
        ("float8_e5m2", "fp8_e5m2"),
        ("float6_e3m2", "fp6_e3m2"),
        ("float6_e2m3", "fp6_e2m3"),
        ("float4_e2m1", "fp4_e2m1"),
        ("int8", "int8"),
        ("MXFP4[E2M1]", "fp4_e2m1"),
        ("mxint4", "int4"),
    ],
)
def test_names(name, element):
    config = MXConfig(elem_dtype_name=name)
    assert config.elem_dtype is dtype_of(pt2mx.ELEMENTS[element]) and config.block_size == 32
    assert config.to_dict() == {"elem_dtype_name": name, "block_size": 32}


def test_spellings_with_more():
    assert MXConfig("MXFP4[E2M1]{16}").block_size == 16 and MXConfig("MXFP4[E2M1]{16}", 8).block_size == 8
    assert MXConfig("mxfp4{16}(rceil,half_away)").spec == pt2mx.parse("mxfp4{16}(rceil,half_away)")
    config = MXConfig(pt2mx.dtypes.float6_e3m2)
    assert config.to_dict() == {"elem_dtype_name": "mxfp6_e3m2{32}", "block_size": 32}
    assert MXConfig.load_from_dict(config.to_dict()) == config


@pytest.mark.parametrize("config", [FP4, LINEAR, QAttentionConfig(LINEAR), ATTENTION], ids=lambda c: type(c).__name__)
def test_dict_round_trip(config):
    assert type(config).load_from_dict(config.to_dict()) == config
    assert hash(type(config).load_from_dict(config.to_dict())) == hash(config)


def test_dicts_are_those_of_torchmx():
    weight, activation = {"elem_dtype_name": "float6_e3m2", "block_size": 16}, FP8.to_dict()
    linear = {"weights_config": weight, "activations_config": activation}
    assert LINEAR.to_dict() == linear and QAttentionConfig(LINEAR).to_dict() == {"projection_config": linear}
    assert ATTENTION.to_dict()["attention_weights_config"] == weight
    assert QAttentionConfig.load_from_dict({"projection_config": linear, "query_config": None}) == QAttentionConfig(
        LINEAR
    )
    assert ATTENTION.is_qkv_quantization_enabled and not QAttentionConfig(LINEAR).is_qkv_quantization_enabled


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MXConfig("float9"), "unknown MX element format"),
        (lambda: MXConfig("int8", 0), "block_size=0"),
        (lambda: MXConfig("BFP[8|5]{16}"), "E8M0 scales"),
        (lambda: QLinearConfig(FP8, "float8_e4m3"), "activations_config must be of type MXConfig, not 'float8_e4m3'"),
        (lambda: QLinearConfig(None, FP8), "weights_config must be of type MXConfig, not None"),
        (lambda: QAttentionConfig(FP8), "projection_config must be of type QLinearConfig"),
        (lambda: QAttentionConfig(LINEAR, query_config=FP8), "all of .* or none; missing: key_config, value_config"),
        (lambda: QAttentionConfig(LINEAR, None, FP8, FP8, FP8), "missing: query_config"),
        (lambda: MXConfig.load_from_dict({"block_size": 32}), "elem_dtype_name missing"),
        (lambda: MXConfig.load_from_dict({"elem_dtype": "int8"}), "did you mean 'elem_dtype_name'"),
        (lambda: QLinearConfig.load_from_dict({"weights_config": FP8.to_dict()}), "activations_config missing"),
        (lambda: QLinearConfig.load_from_dict({**LINEAR.to_dict(), "weights_config": "int8"}), "loaded from a dict"),
    ],
)
def test_errors(make, match):
    with pytest.raises(MXError, match=match):
        make()
