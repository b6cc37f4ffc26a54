"""Quantization with scales that have a significand, by the C++ kernels: equal to the definition to the bit."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler

from pt2mx import FORMATS, SCALE_FORMATS, MXSpec
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.cpu.build import SOURCES
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS
from tests.cpu_kernels import DTYPES, assert_same, check_cpu, cpu, random_specs
from tests.oracle import NARROW
from tests.random_values import every_code_and_scale, random_values

FLOAT_SCALES = [name for name, scale in SCALE_FORMATS.items() if not scale.is_power_of_two]
MODES = [(mode, rounding) for mode in FLOAT_SCALE_MODES for rounding in ROUNDINGS]


def scale_of_tensor(x: Tensor, spec: MXSpec, factor: float = 1.0) -> Tensor | None:
    """A multiple of the tensor's own scale, in the range of the kernels; None for formats without one."""
    t = float_scales.tensor_scale(x, spec) if spec.scale_format.tensor else None
    return None if t is None else (t * factor).clamp(2.0**-100, 2.0**100)


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
def test_every_mode(scale_format):
    """Ragged blocks along either axis; tensor scales of the tensor itself, and others."""
    for i, (scale_mode, rounding) in enumerate(MODES):
        name = ("fp4_e2m1", "fp8_e4m3", "int4", "fp6_e2m3", "int8")[i % 5]
        spec = MXSpec(name, (16, 32, 3)[i % 3], i % 2, scale_mode, rounding, scale_format=scale_format)
        x = torch.cat([random_values((6, 70), DTYPES[i % 3], kind) for kind in range(5)])
        for factor in (1.0, 0.37, 3.0)[: 3 if spec.scale_format.tensor else 1]:
            check_cpu(x, spec, i, DTYPES[i // 3 % 3], scale_of_tensor(x, spec, factor))


@pytest.mark.parametrize("name", NARROW)
def test_every_element(name):
    """NVFP4's scales with each element."""
    for i, rounding in enumerate(ROUNDINGS):
        spec = MXSpec(name, 16, i % 2, list(FLOAT_SCALE_MODES)[i % 6], rounding, scale_format="e4m3_f32")
        x = torch.randn(33, 70).to(DTYPES[i % 3])
        check_cpu(x, spec, i, DTYPES[i % 3], scale_of_tensor(x, spec))


@pytest.mark.diagonal
@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_with_every_scale(name, scale_format):
    data, scale, length = every_code_and_scale(name, scale_format)
    spec = MXSpec(name, length, 1, scale_format=scale_format)
    for tensor_scale in (torch.tensor(1.0), torch.tensor(0.0123), torch.tensor(2.0**60)):
        t = tensor_scale if spec.scale_format.tensor else None
        for dtype in DTYPES:
            expected = reference.dequantize(data, scale, spec, dtype, length, tensor_scale=t)
            assert_same(cpu.dequantize(data, scale, spec, dtype, length, t), expected, (spec, dtype))


def test_random_specs():
    for i, (x, spec) in enumerate(random_specs(100, MODES, FLOAT_SCALES)):
        check_cpu(x, spec, 5, x.dtype, scale_of_tensor(x, spec, (1.0, 1.3, 0.013, 2.0**10)[i % 4]))


def test_left_to_the_definition():
    """Blocks of several rows, and tensor scales near the limits of float32."""
    x, spec = torch.randn(4, 32), MXSpec("fp4_e2m1", 16, 1, scale_format="e4m3_f32")
    for tensor_scale in (0.0, 2.0**-120, 2.0**120, float("nan"), float("inf"), -1.0):
        assert cpu.quantize(x, spec, None, torch.tensor(tensor_scale)) is None, tensor_scale
    assert cpu.fake_quantize(x, MXSpec("fp8_e4m3", 16, 1, block_rows=2), None) is None


@pytest.mark.slow
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "every_mode or every_code")


#: a program whose arithmetic traps where it overflows; only the first code is used
DEFINED = """
#include <cmath>
#include "float_scale.h"

int main() {
  FloatScale e4m3{};
  e4m3.dtype = BYTE, e4m3.mantissa_bits = 3, e4m3.bias = 7, e4m3.emin = -6, e4m3.max_code = 126;
  volatile float values[] = {1, INFINITY, NAN};
  volatile int32_t codes[3];
  for (int i = 0; i < 3; ++i) codes[i] = code_of(values[i], e4m3);
  return codes[0] != 0x38;
}
"""


def test_codes_of_inf_and_nan_are_defined(tmp_path):
    """They are not used, but an overflow would be undefined; `make sanitize` checks all kernels like this."""
    (tmp_path / "codes.cpp").write_text(DEFINED)
    options = ("-std=c++17", "-O1", "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error")
    command = [get_cpp_compiler(), *options, f"-I{Path(SOURCES[0]).parent}", "codes.cpp", "-o", "codes"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "codes"]).returncode == 0
