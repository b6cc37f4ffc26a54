import dataclasses
import io
import json
import os
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

import pt2mx
from pt2mx import MXError, MXQuantizer, load_package, provenance_of
from pt2mx.pt2e.cli.float_model import export
from pt2mx.pt2e.inspect.inspect_file import inspect_file
from pt2mx.pt2e.packages import package
from pt2mx.pt2e.packages.compile import compile_program
from pt2mx.pt2e.packages.signature import Signature
from pt2mx.pt2e.program import provenance
from tests.flow import calibrated, convert
from tests.models import module_of


def net(self, x, rows, parts, image, state, *, times=3, flag=True, mode="up", nothing=None):
    """Inputs of each kind: lengths that may be 1 or not, a sum of lengths, strides, a tree, a written input, constants.

    All outputs are exact, except the output of the linear layer.
    """
    state.add_(1)
    left, right, both = parts["left"], parts["right"], parts["both"]
    scaled = self.fc(x) * times if flag and mode == "up" and nothing is None else x
    numbers = {"rows": x.shape[0], "times": times, "flag": flag, "nothing": nothing}
    return scaled, rows[:2] * 2, torch.cat([left, right]) + both, image.permute(0, 2, 3, 1) * 2, numbers


CONSTANTS = {"times": 3, "flag": True, "mode": "up", "nothing": None}
FREE = {0: Dim.AUTO}
SHAPES = {
    "x": FREE,
    "rows": FREE,
    "parts": {"left": FREE, "right": FREE, "both": FREE},
    "image": {0: Dim("images", max=9)},
    "state": None,
    **dict.fromkeys(CONSTANTS),
}


def inputs(x=4, rows=5, left=3, right=3, images=2, both=None):
    parts = {"left": torch.randn(left, 5), "right": torch.randn(right, 5)}
    parts["both"] = torch.randn(left + right if both is None else both, 5)
    image = torch.randn(images, 3, 4, 6).to(memory_format=torch.channels_last)
    return torch.randn(x, 64), torch.randn(rows, 8), parts, image, torch.zeros(3)


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    with torch.no_grad():
        model = module_of(net, fc=nn.Linear(64, 32))
        graph = torch.export.export(model.eval(), inputs(), CONSTANTS, dynamic_shapes=SHAPES).module()
    return pt2mx.convert_pt2e(calibrated(graph, MXQuantizer.from_recipe("mxfp8"), *inputs(), **CONSTANTS))


@pytest.fixture(scope="module")
def path(converted, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "net.pt2"
    with torch.no_grad():
        program = torch.export.export(converted, inputs(), CONSTANTS, dynamic_shapes=SHAPES)
    compile_program(program, path, recipe=MXQuantizer.from_recipe("mxfp8"))
    return path


@pytest.fixture(scope="module")
def loaded(path):
    return load_package(path)


def check_equal(got, want):
    (*got, numbers), (*want, expected_numbers) = got, want
    assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in want]
    assert torch.allclose(got[0], want[0], atol=1e-5) and all(map(torch.equal, got[1:], want[1:]))
    assert numbers == expected_numbers and list(map(type, numbers.values())) == [int, int, bool, type(None)]


@pytest.mark.compiled
@pytest.mark.parametrize(
    "sizes",
    [{}, {"x": 1}, {"images": 1}, {"left": 1}, {"right": 1, "left": 3}, {"x": 1, "images": 1, "left": 1}, {"x": 70},
     {"rows": 2}, {"rows": 9}, {"images": 9}, {"images": 0}],
    ids=str,
)  # fmt: skip
def test_sizes_that_the_program_takes(sizes, loaded, converted):
    args = inputs(**sizes)
    with torch.no_grad():
        check_equal(loaded(*args, **CONSTANTS), converted(*args, **CONSTANTS))


@pytest.mark.compiled
def test_ranges_are_those_in_which_compiled_code_is_right(loaded):
    """The code reads two rows where the program reads one: tracing assumed a length of at least 2."""
    ranges = dict(zip(loaded.signature.names, loaded.signature.ranges, strict=True))
    assert ranges["x"] == [(1, None), (64, 64)] and ranges["rows"] == [(2, None), (8, 8)]
    assert ranges["parts_left"][0] == (1, None) and ranges["image"][0] == (0, 9) and ranges["times"] is None


def changed(**changes):
    args = dict(zip(("x", "rows", "parts", "image", "state"), inputs(), strict=True))
    args.update({name: value for name, value in changes.items() if name in args})
    constants = {**CONSTANTS, **{name: value for name, value in changes.items() if name not in args}}
    return tuple(args.values()), constants


REFUSED = {
    "another dtype": (changed(x=torch.randn(4, 64).double()), "the input 'x' must be of shape .* not .* torch.float64"),
    "a smaller static size": (changed(x=torch.randn(4, 32)), r"the input 'x' must be of shape \(1 to any, 64\)"),
    "a larger static size": (changed(x=torch.randn(4, 96)), "the input 'x' must be"),
    "another rank": (changed(x=torch.randn(64)), "the input 'x' must be"),
    "no tensor": (changed(x=3.0), "the input 'x' must be .* not 3.0"),
    "a length that the code does not take": (changed(rows=torch.randn(1, 8)), r"\(2 to any, 8\)"),
    "an empty tensor": (changed(x=torch.randn(0, 64)), r"\(1 to any, 64\)"),
    "too many": (changed(image=torch.randn(10, 3, 4, 6)), r"\(0 to 9, 3, 4, 6\)"),
    "another device": (changed(x=torch.randn(4, 64, device="meta")), "the input 'x' must be on cpu, not on meta"),
    "a sparse tensor": (changed(x=torch.randn(4, 64).to_sparse()), "the input 'x' must be"),
    "a quantized tensor": (changed(x=pt2mx.MXTensor.to_mx(torch.randn(4, 64), "mxfp8")), "not MXTensor"),
    "a wrong sum": ((inputs(both=9), CONSTANTS), "must meet the condition parts_both.shape.0. =="),
    "another int": (changed(times=4), "the input 'times' is the constant 3 of the export, and cannot be 4"),
    "a float for an int": (changed(times=3.0), "the constant 3"),
    "another bool": (changed(flag=False), "the constant True of the export, and cannot be False"),
    "an int for a bool": (changed(flag=1), "the constant True"),
    "another string": (changed(mode="down"), "the constant 'up' of the export, and cannot be 'down'"),
    "something for None": (changed(nothing=torch.zeros(1)), r"the constant None of the export, and cannot be \(1,\)"),
    "a tensor for an int": (changed(times=torch.tensor(3)), "the constant 3"),
    "too few": ((inputs()[:4], CONSTANTS), "call it with the arguments x, rows, parts, image, state in this order"),
    "more than it takes": (((*inputs(), torch.zeros(1)), CONSTANTS), "given are 6 positional arguments and"),
    "a keyword less": ((inputs(), {"times": 3}), "and the keywords times, flag, mode, nothing: given are 5"),
    "a keyword more": ((inputs(), {**CONSTANTS, "k": 1}), "call it with"),
    "another tree": (changed(parts=list(inputs()[2].values())), "the argument 'parts' must be nested as in"),
    "a tree with a part missing": (changed(parts={"left": torch.randn(2, 5)}), "the argument 'parts' must be nested"),
}  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_the_program_does_not_take(name, loaded):
    (args, kwargs), message = REFUSED[name]
    with pytest.raises(MXError, match=message):
        loaded(*args, **kwargs)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.randn(64, 4).t()),
        ("x", torch.randn(4, 128)[:, ::2]),
        ("x", torch.randn(1, 64).expand(4, 64)),
        ("x", torch.randn(257)[1:].view(4, 64)),
        ("x", torch.randn(4, 64, requires_grad=True)),
        ("x", torch.randn(4, 64, dtype=torch.complex64).conj().imag),  # the negation is lazy
        ("image", torch.randn(2, 3, 4, 6)),
        ("image", torch.randn(2, 6, 4, 3).transpose(1, 3)),
    ],
)
def test_strides_that_compiled_code_does_not_expect(name, value, loaded, converted):
    args, _ = changed(**{name: value})
    with torch.no_grad():
        check_equal(loaded(*args, **CONSTANTS), converted(*args, **CONSTANTS))


@pytest.mark.compiled
def test_inputs_that_are_written(loaded):
    args = inputs()
    loaded(*args, **CONSTANTS)
    assert args[-1].tolist() == [1, 1, 1]
    with pytest.raises(MXError, match="the input 'state' is written to: pass it with the strides of the example"):
        loaded(*args[:-1], torch.zeros(6)[::2], **CONSTANTS)


@pytest.mark.compiled
def test_keywords_and_keys_in_any_order(loaded, converted):
    """Keyword arguments, keys of a dict, and parameters passed by name."""
    x, rows, parts, image, state = inputs()
    with torch.no_grad():
        want = converted(x, rows, parts, image, torch.zeros(3), **CONSTANTS)
        reordered = dict(reversed(parts.items()))
        check_equal(loaded(x, rows, reordered, image, state, **dict(reversed(CONSTANTS.items()))), want)
        check_equal(loaded(x, rows, state=state, image=image, parts=parts, **CONSTANTS), want)


@pytest.mark.compiled
def test_a_written_input_shares_no_memory(loaded):
    x, rows, parts, image, _ = inputs()
    with pytest.raises(MXError, match="the input 'state' is written to, and shares memory with 'x': pass a clone"):
        loaded(x, rows, parts, image, x.view(-1)[:3], **CONSTANTS)


def write_calls(path, record):
    """Write a package that has a signature and a record of its calls, and no machine code."""
    signature = io.BytesIO()
    torch.save(dict.fromkeys(field.name for field in dataclasses.fields(Signature)), signature)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data/aotinductor/model/c.wrapper.json", record)
        archive.writestr(f"net/{package.EXAMPLE}", signature.getvalue())


def test_operators_that_nothing_defines(tmp_path):
    """They are named before the machine code is loaded."""
    node = {"node": {"target": "pt2mx_test_package::twice", "inputs": []}}
    write_calls(tmp_path / "net.pt2", json.dumps({"nodes": [node]}))
    with pytest.raises(MXError, match=r"calls the operator pt2mx_test_package::twice, which .* --import FILE\.py"):
        load_package(tmp_path / "net.pt2")


@pytest.mark.parametrize("read", [load_package, inspect_file])
@pytest.mark.parametrize(
    "record",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"nodes": 5}',
        b'{"nodes": [{}]}',
        b'{"nodes": [{"node": {}}]}',
        b'{"nodes": [{"node": 1}]}',
    ],
)
def test_a_damaged_record_of_calls(record, read, tmp_path):
    write_calls(tmp_path / "net.pt2", record)
    with pytest.raises(MXError, match=r"could not read the package .*net\.pt2'.*; compile its program again"):
        read(tmp_path / "net.pt2")


@pytest.mark.compiled
def test_a_package_records_its_provenance(path, monkeypatch):
    assert provenance_of(path) == provenance.Provenance.here(MXQuantizer.from_recipe("mxfp8"))
    monkeypatch.setattr(provenance, "__version__", "9.9")
    with pytest.warns(UserWarning, match=f"was written by pt2mx {pt2mx.__version__}, and this is 9.9"):
        load_package(path)


def test_a_dynamic_int_is_refused(tmp_path):
    args, shapes = (torch.randn(2, 64), 3), (None, Dim.DYNAMIC)
    exported = export(module_of(lambda self, x, n: self.fc(x) * n, fc=nn.Linear(64, 32)).eval(), args, shapes).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, MXQuantizer.from_recipe("mxfp8")))
    with pytest.raises(MXError, match="the input 'n' is a dynamic number, which pt2mx cannot export again: export the"):
        compile_program(export(converted, args, shapes), tmp_path / "n.pt2")
    assert not os.listdir(tmp_path)


def masked(self, x, mask):
    """Reads as many values of the mask as x has; the export has no guard for it."""
    rows, columns = (torch.arange(n) for n in x.shape[:2])
    return self.fc(x) * mask[rows[:, None], columns][..., None]


@pytest.mark.compiled
def test_sizes_that_the_program_compares_at_run_time(tmp_path):
    """The example has a batch as large as its length."""
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    args, shapes = (torch.randn(4, 4, 64), torch.rand(4, 4)), (free, free)
    exported = export(module_of(masked, fc=nn.Linear(64, 32)).eval(), args, shapes).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, MXQuantizer.from_recipe("mxfp8")))
    compile_program(export(converted, args, shapes), tmp_path / "net.pt2")
    loaded = load_package(tmp_path / "net.pt2")
    for batch, length in [(1, 9), (4, 1), (1, 1), (3, 9)]:
        x, mask = torch.randn(batch, length, 64), torch.rand(batch, length)
        with torch.no_grad():
            assert torch.allclose(loaded(x, mask), converted(x, mask), atol=1e-5)
    for rows, columns, dim in [(2, 9, 0), (1, 9, 0), (4, 5, 1), (4, 1, 1)]:
        with pytest.raises(MXError, match=rf"must meet the condition mask.shape\[{dim}\] >= x.shape\[{dim}\]"):
            loaded(torch.randn(4, 9, 64), torch.rand(rows, columns))


@pytest.mark.compiled_except("KeyboardInterrupt")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_failure_leaves_the_old_package(error, converted, tmp_path, monkeypatch):
    def fail(file, files):
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *args, **kwargs: [])
    monkeypatch.setattr(package, "package_aoti", fail)
    (tmp_path / "net.pt2").write_text("old")
    with torch.no_grad():
        program = torch.export.export(converted, inputs(), CONSTANTS, dynamic_shapes=SHAPES)
    with pytest.raises(error):
        compile_program(program, tmp_path / "net.pt2")
    assert os.listdir(tmp_path) == ["net.pt2"] and (tmp_path / "net.pt2").read_text() == "old"


@pytest.mark.compiled
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("inputs", [1, 2])
def test_no_row_is_lost(inputs, portable, tmp_path):
    def args(n):
        return torch.randn(49 * n, 32), *([torch.randn(n, 8)] if inputs == 2 else [])

    length = Dim("n", min=2, max=512)
    shapes = ({0: 49 * length}, {0: length})[:inputs]
    # a linear layer, and the mean of each patch of 7 by 7 positions
    patches = module_of(lambda self, x, scale=1: self.fc(x).view(-1, 49, 8).mean(1) * scale, fc=nn.Linear(32, 8))
    converted = convert(patches, args(4), "mxfp8", shapes=shapes)
    with torch.no_grad():
        program = torch.export.export(converted, args(4), dynamic_shapes=shapes)
    compile_program(program, tmp_path / "net.pt2", portable=portable)
    compiled = load_package(tmp_path / "net.pt2")
    with torch.no_grad():
        for n in (2, 3, 5, 7, 48, 49, 50, 512):
            x = args(n)
            torch.testing.assert_close(compiled(*x), converted(*x), rtol=1e-5, atol=1e-5)
