import errno
import io
import os
import signal
import stat
import sys

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.pt2e.files import output
from pt2mx.pt2e.files.output import (
    check_distinct,
    check_output,
    deferred_interrupts,
    folder_errors,
    whole_file,
    write_text,
)

#: writes beyond a limit on the size of files, like on a full disk, with torch's and Python's writers; run in another
#: process
FULL_DISK = """
import resource, sys
import torch
from torch import nn
from pt2mx import MXError
from pt2mx.pt2e.files.output import whole_file

model = nn.Linear(512, 512)
program = torch.export.export(model, (torch.randn(2, 512),))
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
for write in (
    lambda file: torch.export.save(program, file),
    lambda file: torch.save(model, file),
    lambda file: file.write(bytes(10**6)),
    lambda file: [file.write(bytes(1000)) for _ in range(1000)],
):
    try:
        with whole_file(sys.argv[1]) as file:
            write(file)
    except MXError as error:
        print(error)
"""


@pytest.fixture
def report():
    exported = torch.export.export(nn.Linear(64, 32), (torch.randn(2, 64),)).module()
    return pt2mx.quantization_report(pt2mx.prepare_pt2e(exported, MXQuantizer.from_recipe("mxfp8")))


@pytest.fixture
def old(tmp_path):
    """A file that must not change."""
    path = tmp_path / "old.pt2"
    path.write_text("old")
    return path


def test_what_is_written_for_the_user_goes_into_a_folder_that_exists(report, tmp_path):
    for write in (report.to_html, report.to_json, MXQuantizer.from_recipe("mxfp8").to_recipe):
        with pytest.raises(MXError, match=r"cannot write '.*nowhere/file': it must be a file in a folder that exists"):
            write(tmp_path / "nowhere" / "file")
        with pytest.raises(MXError, match="must be a file"):
            write(tmp_path)
        assert write(tmp_path / "file") == (tmp_path / "file").read_text() == write()
    assert os.listdir(tmp_path) == ["file"]


def test_text_and_no_path(tmp_path):
    assert write_text("µ", None) == "µ" == write_text("µ", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == "µ".encode()


@pytest.mark.parametrize("writes", [0, 1, 10**7])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, OSError, MXError])
def test_what_fails_leaves_the_old_file_and_nothing_else(error, writes, old, tmp_path):
    with pytest.raises(error), whole_file(old) as file:
        file.write(bytes(writes))
        raise error("of something else")
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["old.pt2"]


@pytest.mark.parametrize("when", [1, 5, 20])
def test_interrupts_inside_the_writer_of_torch(when, old, tmp_path, monkeypatch):
    """An exception that passes through the writer ends the process."""
    program, calls, write = torch.export.export(nn.Linear(64, 64), (torch.randn(2, 64),)), [], output._File.write

    def interrupted(self, data):
        calls.append(data)
        if len(calls) == when:
            signal.raise_signal(signal.SIGINT)
        return write(self, data)

    monkeypatch.setattr(output._File, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), whole_file(old) as file, deferred_interrupts():
        torch.export.save(program, file)
    assert len(calls) > when and old.read_text() == "old" and os.listdir(tmp_path) == ["old.pt2"]
    with pytest.raises(KeyboardInterrupt):  # as before
        signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX alone has the limits")
def test_a_full_disk(old, tmp_path, run_python):
    printed = run_python(FULL_DISK, [str(old)]).splitlines()
    assert printed == [f"cannot write {str(old)!r}: File too large"] * 4
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["old.pt2"]


def test_an_error_that_follows_from_a_full_disk_is_that_of_the_disk(old):
    with pytest.raises(MXError, match=r"cannot write '/dev/full': No space left on device"):
        with whole_file("/dev/full") as file:
            file.write(b"text")
            raise RuntimeError("what was written is no archive")
    with pytest.raises(RuntimeError, match=r"of something else"), whole_file(old):
        raise RuntimeError("of something else")


def test_modes_and_links_stay(old, tmp_path):
    old.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(old)
    write_text("new", link)
    assert link.is_symlink() and old.read_text() == "new" and stat.S_IMODE(old.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        write_text("new", tmp_path / "fresh")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640


def test_devices_are_written_to_directly():
    write_text("text", "/dev/null")
    assert not os.path.isfile("/dev/null")
    with pytest.raises(MXError, match="cannot write '/dev/full': No space left on device"):
        write_text("text", "/dev/full")


@pytest.mark.parametrize("existing", [True, False])
def test_no_permission(existing, tmp_path, monkeypatch):
    if existing:
        (tmp_path / "a").write_text("")
    refused = tmp_path / "a" if existing else tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: path != refused)  # root may write everywhere
    with pytest.raises(MXError, match="no permission to; choose another place"):
        check_output(tmp_path / "a")


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="POSIX alone has names of open files")
@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_pipe_is_written_to_by_its_name(folder):
    out, into = os.pipe()
    try:
        check_output(f"{folder}/{into}")
        write_text("text", f"{folder}/{into}")
        assert os.read(out, 9) == b"text"
        with whole_file(f"{folder}/{into}") as file:
            torch.export.save(torch.export.export(nn.Linear(1, 1), (torch.zeros(3, 1),)), file)
        assert torch.export.load(io.BytesIO(os.read(out, 10**6))).module()(torch.zeros(3, 1)).shape == (3, 1)
    finally:
        os.close(out)
        os.close(into)


@pytest.mark.parametrize("path", ["a" * 300, "nul\0", 5, None, ".", "file/", "file/.", "nowhere/../file"])
def test_what_is_no_place_for_a_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (check_output, lambda path: whole_file(path).__enter__()):
        with pytest.raises(MXError, match="cannot write"):
            write(path)


def test_an_object_that_is_no_path_is_named_by_its_type():
    with pytest.raises(MXError, match=r"cannot write .5.: a path is a string or an os\.PathLike .*, not of type int"):
        check_output(5)


def test_suffixes():
    check_output("report.JSON", (".json", ".html"))
    with pytest.raises(MXError, match=r"cannot write 'report': its name must end in \.json or \.html"):
        check_output("report", (".json", ".html"))


def test_two_names_of_one_file(old, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("old.pt2")
    (tmp_path / "folder").symlink_to(".")
    for other in ("old.pt2", "./old.pt2", "link", "folder/old.pt2", str(old), old):
        with pytest.raises(MXError, match="--output and --report are one file"):
            check_distinct({"--output": "old.pt2", "--report": other}, {})
        with pytest.raises(MXError, match="the program and --output are one file"):
            check_distinct({"--output": "old.pt2", "--report": None}, {"the program": other})
    with pytest.raises(MXError, match="are one file"):
        check_distinct({"--output": "new", "--report": "folder/new"}, {})
    check_distinct({"--output": "old.pt2", "--report": "new"}, {"--more": None})
    check_distinct({"--output": "/dev/null", "--report": "/dev/null"}, {"--inputs": "/dev/null"})
    check_distinct({"--output": "new"}, {"a batch": "old.pt2", "the same batch": "link"})


def test_errors_of_a_folder_name_it_and_others_pass(tmp_path):
    with pytest.raises(MXError, match=r"cannot write to '/proc/new': No such file or directory; give a folder") as told:
        with folder_errors("/proc/new"):
            os.mkdir("/proc/new")
    assert isinstance(told.value.__cause__, FileNotFoundError)
    with pytest.raises(MXError, match="No space left on device; make room there"):
        with folder_errors(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ValueError, match="shapes differ"):
        with folder_errors(tmp_path):
            raise ValueError("shapes differ")
