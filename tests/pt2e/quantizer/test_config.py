import pytest

from pt2mx import (
    MXError,
    MXFakeQuantize,
    MXFormatObserver,
    MXObserver,
    MXQuantizationConfig,
    MXSpec,
    get_default_mx_quantization_config,
)


def test_default_is_mxfp8_weights_and_activations():
    config = get_default_mx_quantization_config()
    assert config == MXQuantizationConfig(activation=MXSpec("fp8_e4m3"), weight=MXSpec("fp8_e4m3"))
    assert config.output is None and config.bias is None and config.is_qat is False


def test_weight_only_and_shared_modes():
    config = get_default_mx_quantization_config("mxfp4", None, 16, scale_mode="rceil", is_qat=True)
    assert config == MXQuantizationConfig(weight=MXSpec("fp4_e2m1", 16, scale_mode="rceil"), is_qat=True)


def test_a_formats_block_size_is_used_unless_another_is_passed():
    config = get_default_mx_quantization_config("mxfp4{16}", MXSpec("fp8_e4m3", 64))
    assert (config.weight.block_size, config.activation.block_size) == (16, 64)
    assert get_default_mx_quantization_config("mxfp4{16}", block_size=8).weight.block_size == 8


def test_spellings_become_specs():
    assert MXQuantizationConfig(weight="MXFP6[E3M2]{16}").weight == MXSpec("fp6_e3m2", 16)


def test_single_operands_have_specs_of_their_own():
    config = MXQuantizationConfig("mxfp8", "mxfp4", operands={"value": "mxint8{16}", "query": None})
    assert config.operands == (("query", None), ("value", MXSpec("int8", 16)))
    assert config.spec_of("value", "activation") == MXSpec("int8", 16)
    assert config.spec_of("query", "activation") is None
    assert config.spec_of("key", "activation") == config.activation
    assert config == MXQuantizationConfig("mxfp8", "mxfp4", operands=config.operands) and hash(config)
    assert get_default_mx_quantization_config("mxfp4", "mxfp8", operands={"key": "mxint8"}).operands


def test_ste_is_of_two_kinds():
    assert MXQuantizationConfig().ste == "identity"
    assert get_default_mx_quantization_config(ste="clipped") == MXQuantizationConfig("mxfp8", "mxfp8", ste="clipped")


def test_observers_are_of_every_role_or_by_role():
    one = MXQuantizationConfig("mxfp8", observer=MXFormatObserver)
    assert one.module_of("activation") is one.module_of("weight") is MXFormatObserver
    some = MXQuantizationConfig("mxfp8", observer={"weight": MXFormatObserver, "activation": MXObserver})
    assert some.observer == (("activation", MXObserver), ("weight", MXFormatObserver)) and hash(some)
    assert [some.module_of(r) for r in ("activation", "weight", "bias")] == [MXObserver, MXFormatObserver, MXObserver]
    assert some == MXQuantizationConfig("mxfp8", observer=some.observer)
    assert get_default_mx_quantization_config(None, "mxfp8", observer=dict(some.observer)) == some
    assert MXQuantizationConfig("mxfp8", is_qat=True, observer=some.observer).module_of("weight") is MXFakeQuantize


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MXQuantizationConfig(observer={"weigth": MXObserver}),
            "unknown role 'weigth' of an observer: did you",
        ),
        (lambda: MXQuantizationConfig(observer={"weight": 3}), "observer=3 must be MXObserver"),
        (
            lambda: MXQuantizationConfig(observer=(1, 2)),
            r"observer must be one, or map roles to observers, not \(1, 2\)",
        ),
        (lambda: MXQuantizationConfig(operands={"valeu": "mxfp4"}), "unknown operand 'valeu': did you mean 'value'"),
        (lambda: MXQuantizationConfig(operands={1: "mxfp4"}), "unknown operand 1: .*allowed: input"),
        (lambda: MXQuantizationConfig(operands={"key": "mxpf4"}), "operand 'key': .*did you mean 'mxfp4'"),
        (lambda: MXQuantizationConfig(operands="value"), "operands must map names to specs.*not 'value'"),
        (lambda: MXQuantizationConfig(operands=7), "operands must map names to specs.*not 7"),
        (lambda: MXQuantizationConfig(ste="clip"), "unknown ste 'clip': did you mean 'clipped'"),
        (lambda: MXQuantizationConfig(weight="mxpf4"), "weight: .*did you mean 'mxfp4'"),
        (lambda: MXQuantizationConfig(activation=7), "activation: "),
        (lambda: MXQuantizationConfig(is_qat="yes"), "is_qat='yes' must be True or False"),
        (lambda: get_default_mx_quantization_config("mxfp4", block_size=0), "block_size=0"),
        (lambda: get_default_mx_quantization_config(scale_mod="floor"), "unknown argument 'scale_mod'"),
        (lambda: get_default_mx_quantization_config(scale_mode="flor"), "did you mean 'floor'"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(MXError, match=message):
        make()


def test_gradients_have_a_format_and_a_rotation():
    config = get_default_mx_quantization_config(
        "mxfp4", "mxfp8", 16, gradient="mxfp8_e5m2(stochastic)", gradient_hadamard=64
    )
    assert config.gradient == MXSpec("fp8_e5m2", 16, rounding="stochastic")
    values = config.to_dict()
    assert (values["gradient"], values["gradient_hadamard"]) == ("mxfp8_e5m2{16}(stochastic)", 64)
    assert MXQuantizationConfig.from_dict(values) == config and hash(config)
    assert MXQuantizationConfig("mxfp8").gradient is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gradient": "mxpf4"}, "gradient: .*did you mean 'mxfp4'"),
        ({"gradient": MXSpec("fp8_e4m3", scale_exp_bits=5)}, "gradient: .*eager calls"),
        ({"gradient": "mxfp4", "gradient_hadamard": 12}, "gradient_hadamard=12 must be a power of two"),
        ({"gradient": "mxfp4", "gradient_hadamard": 0}, "gradient_hadamard=0"),
        ({"gradient": "mxfp4", "gradient_hadamard": True}, "gradient_hadamard=True"),
        ({"gradient_hadamard": 32}, "needs a gradient"),
        ({"gradient": "mxfp8", "weight": None}, "pass a weight or an activation"),
        ({"gradient": "mxfp8", "weight": None, "operands": {"value": None}}, "pass a weight or an activation"),
    ],
)
def test_bad_gradients(how, message):
    with pytest.raises(MXError, match=message):
        MXQuantizationConfig(**{"weight": "mxfp4", **how})
