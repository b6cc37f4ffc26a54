"""The C++ kernels against the reference, to the bit; their build, cache and fallback."""

import subprocess
import sys

import pytest
import torch

from pt2mx import ELEMENTS, FORMATS, MXSpec
from pt2mx.kernels import reference
from pt2mx.kernels.packing import is_packed, packed_length, unpacked_length
from pt2mx.kernels.reference import random_bits
from pt2mx.modes import ROUNDINGS
from tests.cpu_kernels import (
    DTYPES,
    MODES,
    assert_same,
    check_cpu,
    cpu,
    environment,
    modes_of_element,
    random_specs,
)
from tests.kernel_calls import selected
from tests.oracle import NARROW
from tests.random_values import random_values
from tests.threads import on_threads


@pytest.mark.compiled_cases("fp5_*", "fp7_*", "int5*", "int7*", "fp?_e1m?", "int3*", "int6*", "fp8_e6m1", "fp4_e3m0")
@pytest.mark.parametrize("name", NARROW)
def test_every_mode(name):
    """Blocks of 4 and of 32, ragged, along either axis; all of them where the specification's formats round to even."""
    layouts = ((4, 1), (32, 1), (4, 0))
    for i, (scale_mode, rounding) in enumerate(modes_of_element(name)):
        dtype, target = DTYPES[i % 3], DTYPES[i // 3 % 3]
        for block, axis in layouts if name in FORMATS and rounding == "even" else layouts[i // 9 % 3 :][:1]:
            x = torch.cat([random_values((6, 70), dtype, kind) for kind in range(5)])
            check_cpu(x, MXSpec(name, block, axis, scale_mode, rounding), seed=2**62 + i, target=target)


@pytest.mark.parametrize("name", FORMATS)
def test_every_bfloat16_pattern(name):
    """In blocks of one."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for scale_mode, rounding in modes_of_element(name):
        spec = MXSpec(name, 1, 0, scale_mode, rounding)
        seed = torch.tensor(3) if ROUNDINGS[rounding].random else None
        random = [] if seed is None else [cpu.random_bits(seed, x.shape)]
        assert_same(cpu.fake_quantize(x, spec, seed), reference.fake_quantize(x, spec, *random), spec)


@pytest.mark.parametrize("name", NARROW)
def test_every_code_with_every_scale(name):
    """Including bytes with bits that are not part of a code."""
    bits, bytes_ = ELEMENTS[name].bits, torch.arange(256, dtype=torch.uint8)
    data = torch.randint(0, 256, (packed_length(8 << bits, bits),)).to(torch.uint8) if is_packed(bits) else bytes_
    data = data[None].expand(256, -1)  # (scales, bytes)
    scale = bytes_[:, None]
    length = unpacked_length(data.shape[1], bits)
    for dtype in DTYPES:
        spec = MXSpec(name, length, 1)
        expected = reference.dequantize(data, scale, spec, dtype, length)
        assert_same(cpu.dequantize(data, scale, spec, dtype, length), expected, (spec, dtype))
        # the same codes down the columns
        spec = spec.replace(axis=0)
        expected = reference.dequantize(data.T, scale.T, spec, dtype, length)
        assert_same(cpu.dequantize(data.T, scale.T, spec, dtype, length), expected, (spec, dtype))


def test_shapes_axes_and_blocks():
    for x, spec in random_specs(100, MODES):
        check_cpu(x, spec)


@pytest.mark.diagonal
@pytest.mark.parametrize("shape, axis", [((3, 9000), 1), ((9000, 3), 0), ((2, 300, 70), 1), ((2, 70, 1100), 1)])
@pytest.mark.parametrize("block", [1, 5, 32, 3000, 10**9])
def test_tensors_of_several_tiles(shape, axis, block):
    for i, name in enumerate(("fp6_e3m2", "fp4_e2m1", "int8")):
        x = random_values(shape, DTYPES[i], 2)
        check_cpu(x, MXSpec(name, block, axis, "mse" if i == 0 else "rceil", "stochastic"), target=DTYPES[-i])


def test_expanded_and_sliced_inputs():
    x = torch.randn(70, 96)
    channels_last = torch.randn(3, 64, 5, 5).to(memory_format=torch.channels_last)
    for view in (x[:, ::3], x[3:, 5:], x[:1].expand(40, 96), x.T, channels_last):
        check_cpu(view, MXSpec("fp6_e2m3", 32, 1))
    grad = torch.ones(()).expand(70, 96)
    spec = MXSpec("fp4_e2m1", 32, 1)
    assert_same(cpu.clip_gradient(grad, x, spec), reference.clip_gradient(grad, x, spec).contiguous(), "expanded")
    of_double = selected.clip_gradient(grad.double(), x, spec)
    assert_same(of_double.float(), cpu.clip_gradient(grad, x, spec), "double")


def test_not_finite_blocks():
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2, 63], x[3, 0] = torch.inf, -torch.inf, torch.nan, -torch.nan
    for name in FORMATS:
        for i, rounding in enumerate(ROUNDINGS):
            dtype = DTYPES[i % 3]
            check_cpu(x.to(dtype), MXSpec(name, 32, 1, "mse", rounding), target=dtype)
            check_cpu(x.to(dtype).T, MXSpec(name, 32, 0, "floor", rounding), target=dtype)


@pytest.mark.diagonal
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
@pytest.mark.parametrize("axis", [0, 1])
def test_threads_do_not_change_bits(axis, rounding):
    x, spec, seed = torch.randn(700, 700), MXSpec("fp6_e3m2", 32, axis, rounding=rounding), torch.tensor(5)

    def results():
        assert_same(cpu.random_bits(seed, x.shape), random_bits(seed, x.shape), torch.get_num_threads())
        return *cpu.quantize(x, spec, seed), cpu.fake_quantize(x, spec, seed)

    assert all(map(torch.equal, *on_threads(results, 1, 2)))


@pytest.mark.compiled
def test_subnormals_count_where_they_are_flushed(run_python):
    code = """
import torch
from pt2mx import MXSpec, fake_quantize_mx
from pt2mx.kernels import reference
from tests.cpu_kernels import cpu
x = torch.cat([torch.randn(64, 32) * 2.0**-125, torch.randint(-2**23, 2**23, (64, 32)) * 2.0**-149])
specs = (MXSpec("fp4_e2m1", 32, 1), MXSpec("int8", 32, 1, "mse", "up"))
expected = {spec: reference.fake_quantize(x, spec) for spec in specs}
assert torch.set_flush_denormal(True)
for spec, y in expected.items():
    assert torch.equal(cpu.fake_quantize(x, spec, None).view(torch.int32), y.view(torch.int32))
flushed = torch.tensor([2.0**-126]) * 0.5
print(flushed.view(torch.int32).item())  # the mode is as it was
"""
    assert run_python(code).split() == ["0"]


# ---- build, cache, fallback ----

_QUANTIZE = """
import warnings
import torch
from pt2mx.kernels import reference_chunked
from pt2mx.kernels.cpu import build as cpu_build
builds = []
build = cpu_build.compile_library
cpu_build.compile_library = lambda *args: (builds.append(args), build(*args))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pt2mx
    assert not builds and not cpu_build._loaded  # not by an import
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(-3, 3, 96, dtype=dtype).reshape(2, 48)
        y = pt2mx.fake_quantize_mx(x, "mxfp4")
        expected = reference_chunked.fake_quantize(x, pt2mx.MXSpec("fp4_e2m1", 32, 1), None)
        assert torch.equal(y, expected)
ours = [str(w.message) for w in caught if "C++ kernels of pt2mx" in str(w.message)]
print(len(builds), cpu_build.is_available(), len(ours), "or a C++ compiler" in "".join(ours))
"""


@pytest.mark.compiled
def test_without_a_compiler_torch_serves_after_one_warning(run_python, tmp_path):
    assert run_python(_QUANTIZE, env=environment(tmp_path, CXX="/nonexistent")).split() == ["0", "False", "1", "True"]


@pytest.mark.compiled
def test_failing_compiler(run_python, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *quantize.cpp*) exit 1;; *) echo compiler 1.0;; esac\n')
    compiler.chmod(0o755)
    assert run_python(_QUANTIZE, env=environment(tmp_path, CXX=str(compiler))).split() == ["1", "False", "1", "True"]


@pytest.mark.slow
def test_builds_once_for_all_processes(run_python, tmp_path):
    """Two processes at once both build; a later one loads what they built."""
    env = environment(tmp_path)
    command = [sys.executable, "-c", _QUANTIZE]
    together = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in together:
        assert process.communicate()[0].split()[1:] == ["True", "0", "False"]
        assert process.returncode == 0
    assert run_python(_QUANTIZE, env=env).split() == ["0", "True", "0", "False"]
    assert len(list(tmp_path.rglob("*.so"))) == 1


@pytest.mark.slow
def test_cache_that_cannot_be_written(run_python, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert run_python(_QUANTIZE, env=environment(tmp_path / "file")).split() == ["1", "True", "0", "False"]


@pytest.mark.slow
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "every_mode")
