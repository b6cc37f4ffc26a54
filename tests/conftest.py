import fnmatch
import gc
import os
import signal
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.config import parse_warning_filter

os.environ["HF_HUB_OFFLINE"] = "1"
# Inductor compiles in this process: a pool of compiling processes for each worker of xdist costs more than it gains
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# a collection after each compile looks at all objects since the last one
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# JAX would take three quarters of a GPU's memory for the process that imports it first
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.kernels.cpu import repeated
from tests.fresh_process import IMPORTED, run_program
from tests.left_files import files_of_the_user, temporary_files, use_own_temporary_folder
from tests.models import exported_encoder
from tests.own_formats import forgotten
from tests.patches import patched

use_own_temporary_folder()
pytest.register_assert_rewrite("tests.cpu_kernels", "tests.graph")

#: a marker of cases -> the marker that they get, and whether the named cases or the others get it
CASES = {
    "slow_cases": ("slow", True),
    "slow_except": ("slow", False),
    "compiled_cases": ("compiled", True),
    "compiled_except": ("compiled", False),
}
#: the files of the user before the tests
FILES = pytest.StashKey[set]()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", help="run part I of N of the tests, counted from 0; each test is in one")


def pytest_collection_modifyitems(config, items):
    mark_cases(config, items)
    keep_part(config, items)


def keep_part(config, items):
    """Keep the tests of `--part`, by a digest of their names: the parts are alike in what they cost."""
    if part := config.getoption("--part"):
        index, count = map(int, part.split("/"))
        kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == index]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def mark_cases(config, items):
    """Mark the cases of parametrized tests slow that `slow_cases` names, and those that `slow_except` does not name;
    the same for `compiled`. Names are ids, or patterns of them; in a collection of whole files, one that names no case
    is an error."""
    cases = {}
    for item in items:
        for name, (tier, the_named) in CASES.items():
            if marker := item.get_closest_marker(name):
                patterns = cases.setdefault((item.nodeid.partition("[")[0], marker.args), set())
                case = item.callspec.id
                named = {p for p in marker.args if p == case or fnmatch.fnmatchcase(case, p)}
                patterns |= named
                if bool(named) == the_named:
                    item.add_marker(tier)
    if any("::" in argument for argument in config.args):
        return
    for (test, patterns), named in cases.items():
        if unknown := set(patterns) - named:
            raise pytest.UsageError(f"{test} has no case {', '.join(sorted(unknown))}")


def pytest_collection_finish():
    """Leave what all tests share out of garbage collection, and collect less often: graphs make many objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_sessionstart(session):
    session.config.stash[FILES] = files_of_the_user()


@pytest.hookimpl(tryfirst=True)  # before the summary
def pytest_sessionfinish(session):
    """The tests fail if they left files in the checkout or in the home of the user."""
    config = session.config
    if hasattr(config, "workerinput"):  # the process that started the workers looks
        return
    if left := sorted(files_of_the_user() - config.stash[FILES]):
        config.get_terminal_writer().line(f"\nThe tests left files: {', '.join(left)}", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Print the slowest functions, all cases of one together, with their fixtures."""
    seconds = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("[")[0]] += report.duration
    if seconds.total() < 60:
        return
    terminalreporter.section("slowest functions")
    for function, spent in seconds.most_common(10):
        terminalreporter.write_line(f"{spent:6.1f} s  {function}")
    terminalreporter.write_line(f"{seconds.total():6.1f} s  all {len(seconds):,} functions, of all processes")


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
