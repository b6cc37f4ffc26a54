import json
import os
import threading
import zipfile

import pytest
import torch
from torch import nn
from torch._export.serde import serialize

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Quantize, is_ours
from pt2mx.pt2e.files.archive import add_records, read_record
from pt2mx.pt2e.files.output import whole_file
from pt2mx.pt2e.inspect.inspect_file import inspect_file
from pt2mx.pt2e.program import provenance
from pt2mx.pt2e.program.provenance import Provenance, provenance_of, recipe_of
from tests.flow import calibrated, exported
from tests.models import module_of

X = torch.randn(4, 64)


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    model = exported(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)), X)
    return pt2mx.convert_pt2e(calibrated(model, MXQuantizer.from_recipe("mxfp6"), X))


@pytest.fixture
def program(converted):
    return torch.export.export(converted, (X,))


def writes_out_arguments(node):
    """True if a call leaves out only the trailing arguments of scales, whose None means E8M0 for good."""
    left_out = node.target._schema.arguments[len(node.args) :]
    return [a.name for a in left_out] in ([], ["scale_format", "block_rows", "tensor_scale"])


@pytest.mark.parametrize("recipe", [None, "global: {weight: mxfp6}\n", MXQuantizer.from_recipe("mxfp6")])
def test_a_saved_program_says_what_it_is(recipe, program, converted, tmp_path):
    path = tmp_path / "net.pt2"
    pt2mx.save_program(program, path, recipe)
    text = recipe.to_recipe() if isinstance(recipe, MXQuantizer) else recipe
    assert provenance_of(path) == Provenance(pt2mx.__version__, torch.__version__, text)
    extra = {"pt2mx.json": ""}
    loaded = torch.export.load(path, extra_files=extra)  # as any extra file
    assert json.loads(extra["pt2mx.json"])["pt2mx"] == pt2mx.__version__
    ours = [node for node in loaded.graph.nodes if is_ours(node)]
    assert len(ours) == 6 and all(writes_out_arguments(node) for node in ours)
    for again in (loaded, pt2mx.load_program(path)):
        with torch.no_grad():
            assert torch.equal(again.module()(X), converted(X))


def test_a_saved_program_names_the_defaults_that_tracing_leaves_out(tmp_path):
    """Scale modes and roundings, defaults or not, in subgraphs too."""
    config = pt2mx.get_default_mx_quantization_config("mxfp4", "mxfp8", scale_mode="floor", rounding="even")
    branches = module_of(
        lambda self, x: torch.cond(x.sum() > 0, lambda x: self.up(x), lambda x: self.down(x), (x,)) + self.up(x),
        up=nn.Linear(64, 64),
        down=nn.Linear(64, 64),
    )
    model = calibrated(exported(branches.eval(), X), MXQuantizer().set_global(config), X)
    pt2mx.save_program(torch.export.export(pt2mx.convert_pt2e(model), (X,)), tmp_path / "net.pt2")
    graphs = graph_modules(torch.export.load(tmp_path / "net.pt2").graph_module)
    ours = [node for graph in graphs for node in graph.graph.nodes if is_ours(node)]
    assert len(graphs) == 3 and len(ours) >= 3 * 2
    assert all(writes_out_arguments(node) for node in ours)
    specs = [call.spec for graph in graphs for _, call in Quantize.calls_in(graph.graph)]
    modes = {(spec.scale_mode, spec.rounding) for spec in specs}
    assert modes == {("floor", "even")}


def test_another_version_is_a_warning(program, tmp_path, monkeypatch):
    path = tmp_path / "net.pt2"
    monkeypatch.setattr(provenance, "__version__", "0.0.1")
    pt2mx.save_program(program, path)
    monkeypatch.undo()
    message = f"net.pt2' was written by pt2mx 0.0.1, and this is {pt2mx.__version__}: compare its numbers"
    with pytest.warns(UserWarning, match=message) as told:
        pt2mx.load_program(path)
    assert told[0].filename == __file__, "it names the caller's line"
    assert provenance_of(path).pt2mx == "0.0.1"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'{"pt2mx": "9.9", "more": [1]}', Provenance("9.9", None, None)),
        (b"{}", Provenance(None, None, None)),
        (b"[1]", "its record pt2mx.json is broken"),
        (b'{"pt2mx": "9.9", "recipe": 5}', "its record pt2mx.json is broken"),
        (b"\xff", "its record pt2mx.json is broken"),
        (None, None),
    ],
)
def test_records_of_other_versions(content, found, program, tmp_path):
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    if content is not None:
        add_records(path, {"extra/pt2mx.json": content})
    if isinstance(found, str):
        with pytest.raises(MXError, match=found):
            provenance_of(path)
        assert recipe_of(path) is None
        if content.isascii():  # else torch's loader refuses it
            with pytest.warns(UserWarning, match=found):
                pt2mx.load_program(path)
    else:
        assert provenance_of(path) == found


def test_records(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("root/one", "1")
    add_records(path, {"two/three": b"23"})
    assert read_record(path, "one") == b"1" and read_record(path, "two/three") == b"23"
    assert read_record(path, "three") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        (b"", "is no PT2 archive"),
        (b"text", "is no PT2 archive"),
        (b"PK\5\6" + bytes(18), "no program"),
    ],
)
def test_what_is_no_program(content, message, tmp_path):
    path = tmp_path / "net.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MXError, match=message):
        pt2mx.load_program(path)


def test_what_cannot_be_saved(program, tmp_path):
    with pytest.raises(MXError, match="expected an ExportedProgram, not Linear"):
        pt2mx.save_program(nn.Linear(2, 2), tmp_path / "net.pt2")
    with pytest.raises(MXError, match="the recipe must be an MXQuantizer, its YAML or None, not int"):
        pt2mx.save_program(program, tmp_path / "net.pt2", 5)
    with pytest.raises(MXError, match="a filter function cannot be written"):
        pt2mx.save_program(program, tmp_path / "net.pt2", MXQuantizer().set_filter_function(lambda node: True))
    graph = str(program.graph)
    with pytest.raises(MXError, match="cannot write"):
        pt2mx.save_program(program, tmp_path)
    assert not os.listdir(tmp_path) and str(program.graph) == graph


@pytest.mark.parametrize("path", [3, None, b"net.pt2"])
def test_what_is_no_path(path):
    with pytest.raises(MXError, match="no file"):
        pt2mx.load_program(path)


def test_a_truncated_program_is_none(program, tmp_path):
    """Older versions wrote in place, so an interruption left a truncated file."""
    path = tmp_path / "net.pt2"
    with whole_file(path) as file:
        torch.export.save(program, file)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MXError, match=r"is no (PT2 archive|program)"):
        pt2mx.load_program(path)


@pytest.mark.parametrize(
    "content", ["{", "[1]", "{}", "[" * 100_000 + "]" * 100_000], ids=["cut", "list", "empty", "deep"]
)
def test_a_damaged_graph_is_an_error_of_one_line(content, program, tmp_path):
    """To the loader and to what lists a file."""
    torch.export.save(program, tmp_path / "net.pt2")
    with zipfile.ZipFile(tmp_path / "net.pt2") as whole, zipfile.ZipFile(tmp_path / "damaged.pt2", "w") as damaged:
        for name in whole.namelist():
            damaged.writestr(name, content if name.endswith("models/model.json") else whole.read(name))
    for read in (pt2mx.load_program, inspect_file):
        with pytest.raises(MXError, match=r"could not load .*damaged\.pt2': .+") as raised:
            read(str(tmp_path / "damaged.pt2"))
        assert "\n" not in str(raised.value)


def test_the_canonical_form_is_left_out_while_saving(program, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(serialize, "canonicalize", lambda *args: calls.append(args))
    given = serialize.canonicalize
    pt2mx.save_program(program, tmp_path / "net.pt2")
    assert not calls and serialize.canonicalize is given
    assert torch.equal(pt2mx.load_program(tmp_path / "net.pt2").module()(X), program.module()(X))


def test_threads_save_programs(converted, tmp_path):
    """torch refuses to save two at once, and its own canonical form comes back."""
    given, errors = serialize.canonicalize, []

    def save(i):
        try:
            for _ in range(3):
                pt2mx.save_program(programs[i], tmp_path / f"{i}.pt2")
        except BaseException as error:
            errors.append(error)

    programs = [torch.export.export(converted, (X,)) for _ in range(4)]
    threads = [threading.Thread(target=save, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and serialize.canonicalize is given
