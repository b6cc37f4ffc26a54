import argparse
import copy

import pytest

from pt2mx import MXError
from pt2mx.microxcaling import (
    MxSpecs,
    add_mx_args,
    apply_mx_specs,
    finalize_mx_specs,
    get_backwards_mx_specs,
    get_default_mx_specs,
    get_mx_specs,
)

#: microxcaling's own
DEFAULTS = {
    **dict.fromkeys(("scale_bits", "block_size", "bfloat", "fp"), 0),
    **dict.fromkeys(("w_elem_format", "a_elem_format", "w_elem_format_bp", "a_elem_format_bp"), None),
    **dict.fromkeys(("a_elem_format_bp_ex", "a_elem_format_bp_os"), None),
    **dict.fromkeys(("bfloat_subnorms", "quantize_backprop"), True),
    **dict.fromkeys(("mx_flush_fp32_subnorms", "softmax_exp2", "vec_use_exp2", "vec_use_recip", "custom_cuda"), False),
    "shared_exp_method": "max",
    **dict.fromkeys(("round", "round_m", "round_weight", "round_output", "round_grad_weight"), "nearest"),
    **dict.fromkeys(("round_grad_input", "round_mx_output", "round_mx_input_grad_input"), "nearest"),
    **dict.fromkeys(("round_mx_weight_grad_input", "round_mx_grad_output_grad_input"), "nearest"),
    **dict.fromkeys(("round_mx_input_grad_weight", "round_mx_grad_output_grad_weight"), "nearest"),
}


def test_defaults():
    assert dict(get_default_mx_specs()) == dict(MxSpecs()) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "follows"),
    [
        ({"w_elem_format": "int8"}, {"w_elem_format_bp": "int8"}),
        (
            {"a_elem_format": "fp4"},
            dict.fromkeys(("a_elem_format_bp", "a_elem_format_bp_ex", "a_elem_format_bp_os"), "fp4"),
        ),
        (
            {"a_elem_format": "fp4", "a_elem_format_bp_os": "int8"},
            {"a_elem_format_bp": "fp4", "a_elem_format_bp_ex": "fp4"},
        ),
        ({"bfloat": 16, "round": "even"}, {k: "even" for k in DEFAULTS if k.startswith("round")}),
        (
            {"bfloat": 16, "round_grad_input": "floor"},
            {k: "floor" for k in DEFAULTS if k.startswith("round_mx_") and "grad" in k},
        ),
        ({"fp": 16, "quantize_backprop": False}, {}),
    ],
)
def test_what_is_not_given_follows(given, follows):
    before = dict(given)
    assert dict(finalize_mx_specs(given)) == DEFAULTS | given | follows
    assert given == before
    assert dict(finalize_mx_specs(MxSpecs(given))) == DEFAULTS | given | {
        key: value for key, value in follows.items() if "format" in key
    }  # the roundings of MxSpecs are all given


def test_nothing_to_quantize():
    assert finalize_mx_specs({}) is finalize_mx_specs({"block_size": 32, "round": "even"}) is None
    assert dict(finalize_mx_specs({"block_size": 32}, early_exit=False)) == DEFAULTS | {"block_size": 32}


def test_apply_and_backwards():
    base = MxSpecs(bfloat=16)
    assert apply_mx_specs({"block_size": 8, "fp": None}, base) is base and base["block_size"] == 8
    assert dict(apply_mx_specs(None)) == DEFAULTS
    specs = finalize_mx_specs({"w_elem_format": "int8", "a_elem_format": "int8", "block_size": 32, "bfloat": 16})
    assert get_backwards_mx_specs(specs) == specs
    specs["quantize_backprop"] = False
    assert dict(get_backwards_mx_specs(specs)) == DEFAULTS | {"quantize_backprop": False}
    assert specs["bfloat"] == 16 and copy.deepcopy(specs) == specs


@pytest.mark.parametrize(
    ("arguments", "specs"),
    [
        ([], None),
        (["--skip_early_exit"], {}),
        (["--bfloat", "16", "--mx_dir", "somewhere"], {"bfloat": 16}),
        (["--a_elem_format", "fp8_e4m3"], {key: "fp8_e4m3" for key in DEFAULTS if key.startswith("a_elem_format")}),
        (
            ["--fp", "16", "--no_quantize_backprop", "--no_bfloat_subnorms", "--custom_cuda", "--block_size", "16"],
            {"fp": 16, "quantize_backprop": False, "bfloat_subnorms": False, "custom_cuda": True, "block_size": 16},
        ),
        (["--bfloat", "16", "--round", "floor"], {"bfloat": 16} | {k: "floor" for k in DEFAULTS if k[:5] == "round"}),
    ],
)
def test_command_line(arguments, specs):
    parser = add_mx_args(argparse.ArgumentParser())
    got = get_mx_specs(parser.parse_args(arguments))
    assert got is None if specs is None else dict(got) == DEFAULTS | specs


def test_errors():
    for make in (MxSpecs, apply_mx_specs, finalize_mx_specs):
        with pytest.raises(MXError, match="mx_specs have no key 'w_elem_fmt': did you mean 'w_elem_format'"):
            make({"w_elem_fmt": "int8"})
    for make in (apply_mx_specs, finalize_mx_specs):
        with pytest.raises(MXError, match="mx_specs must be a dictionary, not 'int8'"):
            make("int8")
