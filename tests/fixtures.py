"""Fixtures of all tests."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.config import parse_warning_filter

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.kernels.cpu import repeated
from tests.fresh_process import IMPORTED, run_program
from tests.left_files import temporary_files
from tests.models import exported_encoder
from tests.own_formats import forgotten, registered
from tests.patches import patched


@pytest.fixture(autouse=True)
def _leaves_no_temporary_files():
    before = temporary_files()
    yield
    assert temporary_files() <= before


@pytest.fixture(autouse=True)
def _seed():
    # torch.manual_seed formats its stack for each device, also for those that no process uses
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def _no_formats_of_other_tests():
    with forgotten():
        yield


@pytest.fixture(scope="module")
def own_elements():
    """Register the elements of `own_formats.py`."""
    with registered():
        yield


@pytest.fixture(autouse=True)
def _no_calls_of_other_tests():
    """Which may have run in another way: tests replace what kernels look up."""
    repeated.forget()


@pytest.fixture(autouse=True, scope="session")
def _interrupts():
    """As in a terminal: a shell's background jobs ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _nothing_stays_patched():
    """After all tests of a process; after the examples of public functions: `test_docstrings.py`."""
    yield
    assert not patched()


@pytest.fixture(scope="module")
def few_objects():
    """Leave what earlier modules made out of garbage collection, for tests of functions that collect all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiler():
    """torch.compile without what earlier tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def warning_filters(pytestconfig):
    """Those of the tests, as arguments of `warnings.filterwarnings`, for other processes."""
    return [parse_warning_filter(line, escape=False) for line in pytestconfig.getini("filterwarnings")]


@pytest.fixture(scope="session")
def run_python(tmp_path_factory):
    """Run code in a process of its own, with arguments; return what it printed. The process is forked from one that has
    imported torch, Inductor and torchao; torch alone, if `fresh`; `env` asks for a new interpreter, which takes
    seconds."""

    def run(code: str, arguments: tuple | list = (), cwd: Path | None = None, env=None, fresh: bool = False) -> str:
        if env is None:
            folder, imported = tmp_path_factory.mktemp("process"), ("torch",) if fresh else IMPORTED
            status, out, err = run_program(code, "-c", Path(cwd or Path.cwd()), (), arguments, folder, imported)
        else:
            command = [sys.executable, "-c", code, *arguments]
            result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
            status, out, err = result.returncode, result.stdout, result.stderr
        assert status == 0, out + err
        return out

    return run


@pytest.fixture(params=["avx2", "default"])
def on_other_processors(request, run_python):
    """Run tests of a file with the kernels for processors with fewer vector instructions, built once for each state of
    the sources."""
    code = """
import sys, pytest, torch
assert pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[1], "-k", sys.argv[2]]) == 0
print(torch.backends.cpu.get_cpu_capability())
"""

    def run(file: str, tests: str) -> None:
        printed = run_python(code, [file, tests], env=os.environ | {"ATEN_CPU_CAPABILITY": request.param})
        assert printed.strip().lower().splitlines()[-1] in (request.param, "default", "no avx")

    return run


@pytest.fixture(scope="session")
def minilm():
    """The pretrained sentence encoder, exported with dynamic batch and sequence."""
    return exported_encoder()


@pytest.fixture(scope="session")
def resnet18():
    """torchvision's ResNet-18 (random weights, batch norm with statistics), exported with a dynamic batch."""
    torch.manual_seed(0)
    model = import_extra("torchvision", "vision").models.resnet18(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    shapes = ({0: torch.export.Dim("batch")},)
    args = (torch.randn(2, 3, 64, 64),)
    program = torch.export.export(model.eval(), args, dynamic_shapes=shapes)
    return SimpleNamespace(program=program, shapes=shapes, args=args, inputs=args)


@pytest.fixture
def quantize():
    """Prepare, calibrate and convert an exported model: (output of the prepared model with fake quantization on,
    prepared, converted)."""

    def run(program, quantizer, args):
        prepared = pt2mx.prepare_pt2e(program.module(), quantizer)
        with torch.no_grad():
            prepared(*args)
            pt2mx.enable_fake_quant(prepared)
            pt2mx.disable_observer(prepared)
            expected = prepared(*args)
        return expected, prepared, pt2mx.convert_pt2e(prepared)

    return run
