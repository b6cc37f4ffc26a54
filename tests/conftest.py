import fnmatch
import gc
import os
import zlib
from collections import Counter

import pytest

from tests.left_files import files_of_the_user, use_own_temporary_folder

os.environ["HF_HUB_OFFLINE"] = "1"
# Inductor compiles in this process: a pool of compiling processes for each worker of xdist costs more than it gains
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# a collection after each compile looks at all objects since the last one
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# JAX would take three quarters of a GPU's memory for the process that imports it first
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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


def pytest_configure(config):
    """Load the fixtures, which import torch, unless this process runs no tests and starts those that do."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(config, items):
    mark_cases(config, items)
    mark_grids(items)
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


def mark_grids(items):
    """Mark cases of grids compiled that would run by default: those left have each value of each parameter."""
    grids = {}
    for item in items:
        if item.get_closest_marker("diagonal") and not any(map(item.get_closest_marker, ("slow", "compiled"))):
            grids.setdefault(item.nodeid.partition("[")[0], []).append((item, item.callspec._idlist))
    for grid in grids.values():
        axes = [list(dict.fromkeys(names)) for names in zip(*(names for _, names in grid), strict=True)]
        longest = max(range(len(axes)), key=lambda i: len(axes[i]))

        def is_off(case, axes=axes, longest=longest):
            place = axes[longest].index(case[1][longest])
            return any(axis[place % len(axis)] != name for axis, name in zip(axes, case[1], strict=True))

        seen = set()
        for item, names in sorted(grid, key=is_off):
            values = set(enumerate(names))
            if values <= seen:
                item.add_marker("compiled")
            seen |= values


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
