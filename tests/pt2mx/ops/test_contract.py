"""The operators are a contract with other compilers: their schemas change with their versions only."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import torch

from pt2mx.ops import contract
from pt2mx.ops.operator import Operator, T, operator

_MODES = 'str elem_dtype_name, int block_size, int axis=-1, str scale_mode="floor", str rounding="even"'
_NO_DEFAULTS = "str elem_dtype_name, int block_size, int axis, str scale_mode, str rounding"
_LAST_MODES = (
    'str elem_dtype_name, int block_size, str scale_mode="floor", str rounding="even", ScalarType? target_dtype=None'
)
_ROW_MODES = 'str elem_dtype_name, str scale_mode="floor", str rounding="even"'
_REQUIRED = "str scale_mode, str rounding"
_LAST_REQUIRED = f"str elem_dtype_name, int block_size, {_REQUIRED}, ScalarType? target_dtype=None"
_QUANTIZE_ROWS = f'(Tensor x, {_ROW_MODES}, str activation="none") -> (Tensor data, Tensor scale, Tensor rest)'
_LAYER_NORM_ROWS = (
    f"(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, {_ROW_MODES}) -> "
    "(Tensor normed, Tensor data, Tensor scale, Tensor rest)"
)
_WEIGHT = "Tensor x, Tensor weight_data, Tensor weight_scale"

_SCALES = "str? scale_format=None, int? block_rows=None, Tensor? tensor_scale=None"

#: operator -> the schema of each version. A version that was published stays as it is; a change is one more.
RECORDED = {
    "quantize_mx": {
        1: f"(Tensor data_hp, {_MODES}, SymInt? seed=None) -> (Tensor scale, Tensor data)",
        2: f"(Tensor data_hp, {_NO_DEFAULTS}, SymInt? seed=None) -> (Tensor scale, Tensor data)",
        3: f"(Tensor data_hp, {_NO_DEFAULTS}, SymInt? seed=None, {_SCALES}) -> (Tensor scale, Tensor data)",
    },
    "dequantize_mx": {
        1: "(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, int block_size, ScalarType target_dtype, "
        "int block_dim=-1, SymInt? length=None) -> Tensor",
        2: "(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, int block_size, ScalarType target_dtype, "
        "int block_dim, SymInt? length=None) -> Tensor",
        3: "(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, int block_size, ScalarType target_dtype, "
        f"int block_dim, SymInt? length=None, {_SCALES}) -> Tensor",
    },
    "fake_quantize_mx": {
        1: f'(Tensor x, {_MODES}, SymInt? seed=None, str ste="identity") -> Tensor',
        2: f"(Tensor x, {_NO_DEFAULTS}, SymInt? seed, str ste) -> Tensor",
        3: f"(Tensor x, {_NO_DEFAULTS}, SymInt? seed, str ste, {_SCALES}) -> Tensor",
    },
    "clip_gradient_mx": {
        1: f"(Tensor grad, Tensor x, {_MODES}) -> Tensor",
        2: f"(Tensor grad, Tensor x, {_NO_DEFAULTS}) -> Tensor",
        3: f"(Tensor grad, Tensor x, {_NO_DEFAULTS}, {_SCALES}) -> Tensor",
    },
    "tensor_scale_mx": {1: "(Tensor x, str elem_dtype_name, str scale_mode, str scale_format) -> Tensor"},
    "random_bits": {1: "(Tensor seed, SymInt[] size) -> Tensor"},
    "linear_mx": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size) -> Tensor",
        2: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int rotation=0) -> Tensor",
        3: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int rotation=0, "
        "ScalarType? target_dtype=None) -> Tensor",
        4: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int rotation, "
        "ScalarType? target_dtype=None) -> Tensor",
        5: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int rotation, "
        f"ScalarType? target_dtype=None, {_SCALES}) -> Tensor",
    },
    "grouped_linear_mx": {
        1: f"({_WEIGHT}, Tensor offs, str elem_dtype_name, int block_size) -> Tensor",
        2: f"({_WEIGHT}, Tensor offs, str elem_dtype_name, int block_size, ScalarType? target_dtype=None) -> Tensor",
        3: f"({_WEIGHT}, Tensor offs, str elem_dtype_name, int block_size, ScalarType? target_dtype=None, {_SCALES}) "
        "-> Tensor",
    },
    "conv2d_mx": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int[2] stride=1, int[2] padding=0, "
        "int[2] dilation=1, ScalarType? target_dtype=None) -> Tensor",
        2: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int[2] stride, int[2] padding, "
        "int[2] dilation, ScalarType? target_dtype=None) -> Tensor",
        3: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int[2] stride, int[2] padding, "
        f"int[2] dilation, ScalarType? target_dtype=None, {_SCALES}) -> Tensor",
    },
    "linear_mx_mma_layout": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int n) -> Tensor",
        2: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int n, int rotation=0) -> Tensor",
        3: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int n, int rotation) -> Tensor",
        4: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int n, int rotation, Tensor? tensor_scale=None) -> Tensor",
    },
    "normed_linear_mx": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int n, Tensor? squares, float eps, str? gate, "
        "Tensor? tensor_scale=None) -> Tensor",
    },
    "residual_linear_mx": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int n, Tensor residual, Tensor norm_weight, "
        "Tensor? tensor_scale=None) -> (Tensor total, Tensor weighted, Tensor squares)",
    },
    "rotate_and_store": {
        1: "(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor cos, "
        "Tensor sin) -> Tensor",
    },
    "decoding_attention_mx": {
        1: "(Tensor query, Tensor key_data, Tensor key_scale, Tensor value_data, Tensor value_scale, "
        "str elem_dtype_name, int block_size, int value_width, Tensor? mask, float? scale, Tensor? zeros, "
        "str? scale_format=None) -> Tensor",
    },
    "rotate_quantize_and_store": {
        1: "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_data, Tensor(b!) key_scale, Tensor(c!) value_data, "
        "Tensor(d!) value_scale, Tensor slots, Tensor cos, Tensor sin, str elem_dtype_name, int block_size, "
        f"{_REQUIRED}, str? scale_format=None) -> Tensor",
    },
    "store_mx": {
        1: "(Tensor key, Tensor value, Tensor(a!) key_data, Tensor(b!) key_scale, Tensor(c!) value_data, "
        "Tensor(d!) value_scale, Tensor slots, str elem_dtype_name, int block_size, str scale_mode, str rounding) "
        "-> ()",
    },
    "decoding_attention": {
        1: "(Tensor query, Tensor keys, Tensor values, Tensor? mask, float? scale, Tensor? zeros) -> Tensor",
    },
    "attention_mx": {
        1: "(Tensor query, Tensor key_data, Tensor key_scale, Tensor value_data, Tensor value_scale, "
        "str elem_dtype_name, int block_size, int value_width, Tensor? mask=None, float? scale=None) -> Tensor",
        2: "(Tensor query, Tensor key_data, Tensor key_scale, Tensor value_data, Tensor value_scale, "
        "str elem_dtype_name, int block_size, int value_width, Tensor? mask=None, float? scale=None, "
        "str? scale_format=None, Tensor? key_tensor_scale=None, Tensor? value_tensor_scale=None) -> Tensor",
    },
    "hadamard": {
        1: "(Tensor x, int size, int axis=-1) -> Tensor",
        2: "(Tensor x, int size, int axis) -> Tensor",
    },
    "rotated_fake_quantize_mx": {
        1: '(Tensor x, int size, str elem_dtype_name, int block_size, str scale_mode="floor", '
        'str rounding="even") -> Tensor',
        2: '(Tensor x, int size, str elem_dtype_name, int block_size, str scale_mode="floor", '
        'str rounding="even", ScalarType? target_dtype=None) -> Tensor',
        3: f"(Tensor x, int size, str elem_dtype_name, int block_size, {_REQUIRED}, "
        "ScalarType? target_dtype=None) -> Tensor",
    },
    "scaled_mm_mx": {
        1: "(Tensor x_data, Tensor x_scale, Tensor weight_data, Tensor weight_scale, Tensor? bias, "
        "str x_elem_dtype_name, str weight_elem_dtype_name, ScalarType target_dtype) -> Tensor"
    },
    "quantize_fp8_rows": {
        **dict.fromkeys((1, 2), _QUANTIZE_ROWS),
        3: f"(Tensor x, str elem_dtype_name, {_REQUIRED}, str activation) -> (Tensor data, Tensor scale, Tensor rest)",
    },
    "layer_norm_fp8_rows": {
        **dict.fromkeys((1, 2), _LAYER_NORM_ROWS),
        3: _LAYER_NORM_ROWS.replace(_ROW_MODES, f"str elem_dtype_name, {_REQUIRED}"),
    },
    "mm_fp8_rows": {
        1: "(Tensor data, Tensor scale, Tensor rest, Tensor weight_data, Tensor weight_scale, "
        "Tensor? bias=None) -> Tensor"
    },
    "activation_fake_quantize_mx": {
        1: f"(Tensor x, str activation, {_LAST_MODES}) -> Tensor",
        2: f"(Tensor x, str activation, {_LAST_REQUIRED}) -> Tensor",
    },
    "layer_norm_fake_quantize_mx": {
        1: f"(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, {_LAST_MODES}) -> "
        "(Tensor normed, Tensor quantized)",
        2: f"(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, {_LAST_REQUIRED}) -> "
        "(Tensor normed, Tensor quantized)",
    },
    "linear_fake_quantize_mx": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, ScalarType? product_dtype, str activation, "
        'str out_elem_dtype_name, int out_block_size, str scale_mode="floor", str rounding="even", '
        "ScalarType? target_dtype=None) -> Tensor",
        2: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, ScalarType? product_dtype, str activation, "
        f"str out_elem_dtype_name, int out_block_size, {_REQUIRED}, ScalarType? target_dtype=None) -> Tensor",
    },
    "conv2d_fake_quantize_mx": {
        1: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int[2] stride, int[2] padding, "
        "int[2] dilation, ScalarType? product_dtype, Tensor? residual, str activation, bool keep_activated, "
        'str out_elem_dtype_name, int out_block_size, str scale_mode="floor", str rounding="even", '
        "ScalarType? target_dtype=None) -> (Tensor activated, Tensor quantized)",
        2: f"({_WEIGHT}, Tensor? bias, str elem_dtype_name, int block_size, int[2] stride, int[2] padding, "
        "int[2] dilation, ScalarType? product_dtype, Tensor? residual, str activation, bool keep_activated, "
        f"str out_elem_dtype_name, int out_block_size, {_REQUIRED}, ScalarType? target_dtype=None) -> "
        "(Tensor activated, Tensor quantized)",
    },
    "matmul_bfloat16": {1: "(Tensor x, Tensor y, ScalarType? target_dtype=None) -> Tensor"},
    "attention_bfloat16": {
        1: "(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, float? scale=None, "
        'ScalarType? target_dtype=None, str? elem_dtype_name=None, int block_size=32, str scale_mode="floor", '
        'str rounding="even", ScalarType? out_dtype=None) -> Tensor',
        2: "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
        "ScalarType? target_dtype, str? elem_dtype_name, int block_size, "
        f"{_REQUIRED}, ScalarType? out_dtype=None) -> Tensor",
    },
    "swizzle_scale": {1: "(Tensor scale) -> Tensor"},
    "matmul_accumulated": {1: "(Tensor input, Tensor other, Tensor? bias, str accumulator) -> Tensor"},
    "linear_accumulated": {1: "(Tensor input, Tensor weight, Tensor? bias, str accumulator) -> Tensor"},
    "convolution_accumulated": {
        1: "(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, "
        "str accumulator) -> Tensor"
    },
    "attention_accumulated": {
        1: "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale, bool enable_gqa, "
        "str accumulator) -> Tensor"
    },
}

#: operators that exist while Inductor compiles; no program holds them
OF_INDUCTOR = {"dense", "divide", "join_blocks", "look_up", "realize", "realize_if_costly", "stored"}
#: called in training by compiled code alone; conversion leaves none
OF_TRAINING = {"step_variance"}


@pytest.mark.parametrize("name", contract.OPERATORS)
def test_a_schema_changes_with_its_version(name):
    versions = RECORDED[name]
    assert list(versions) == list(range(1, contract.OPERATORS[name].version + 1))
    assert str(contract.schema_of(name)) == f"pt2mx::{name}{versions[contract.OPERATORS[name].version]}"


def test_a_default_other_than_none_is_refused():
    """`torch.export.save` leaves out arguments that equal their default: such a file changes with the default."""
    declare = operator("declared_in_a_test", 1, "x's shape")
    with pytest.raises(TypeError, match=re.escape("size=32: the only default of an argument is None")):

        @declare
        class _Declared(Operator[T]):
            x: Annotated[T, "a tensor"]
            size: Annotated[int, "a size"] = 32


def test_every_operator_is_in_the_contract():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("pt2mx::")}
    assert {name.removeprefix("pt2mx::") for name in registered} - OF_INDUCTOR - OF_TRAINING == set(contract.OPERATORS)


@pytest.mark.parametrize("name", contract.OPERATORS)
def test_every_argument_and_result_has_a_meaning(name):
    operator, schema = contract.OPERATORS[name], contract.schema_of(name)
    assert [argument.name for argument in operator.arguments] == [argument.name for argument in schema.arguments]
    assert all(argument.meaning for argument in operator.arguments) and operator.summary() and operator.example()
    assert list(operator.results) == [result.name for result in schema.returns]


def test_the_document_is_what_is_written():
    command = [sys.executable, "-m", "pt2mx.ops.contract_text"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (Path(contract.__file__).parent / "README.md").read_text() == result.stdout, "write it again"
