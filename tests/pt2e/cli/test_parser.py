import argparse
import importlib
import re
import shlex

import pytest

from pt2mx.pt2e.cli.command import COMMANDS, GROUPS, command_parser
from pt2mx.pt2e.cli.parser import EXAMPLES, subparsers


def leaves(parser):
    inner = subparsers(parser)
    return [leaf for each in inner.values() for leaf in leaves(each)] if inner else [parser]


PARSERS = subparsers(command_parser())
#: words before an option -> the parser that reads it
LEAVES = {leaf.prog.removeprefix("pt2mx "): leaf for parser in PARSERS.values() for leaf in leaves(parser)}


#: attributes that hold the word of no option, and names
MODELS, LISTS = ("model", "folder", "recipe"), ("recipes", "unpack", "destinations", "recipe")
#: command -> the action that it runs without one
DEFAULTS = {"recipes": ["list"]}


def options_of(parser):
    return [name for name in parser._option_string_actions if name.startswith("--")]


@pytest.fixture
def refused(capsys):
    """Parse a wrong command line; return the error, which is one line."""

    def parse(line):
        with pytest.raises(SystemExit) as exit:
            command_parser().parse_args(shlex.split(line))
        out, err = capsys.readouterr()
        assert (exit.value.code, out) == (2, "") and err.startswith("pt2mx: error: ") and err.count("\n") == 1
        return err

    return parse


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_that_parse(command):
    text = PARSERS[command].format_help()
    for task, line in EXAMPLES[command]:
        assert f"  # {task}\n  pt2mx {command} {line}".rstrip() in text
        words = shlex.split(line.partition(" > ")[0])
        options, rest = argparse.ArgumentParser.parse_known_args(PARSERS[command], words or DEFAULTS.get(command, []))
        assert callable(options.run) and not rest


@pytest.mark.parametrize("words", LEAVES)
def test_every_command_runs_knows_json_and_tracebacks(words):
    parser = LEAVES[words]
    assert {"--json", "--traceback"} <= set(options_of(parser))
    module, function = parser.get_default("run").args
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.compiled_except("quantize", "compile", "export-onnx")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_command_is_refused_with_the_nearest(command, refused):
    for misspelt in (command[:-1], command[0] + command[2:], command.replace("e", "ee", 1) + "s"):
        assert f"invalid choice: {misspelt!r}: did you mean {command!r}? allowed: " in refused(misspelt)


@pytest.mark.compiled_except("", "compile", "inspect", "recipes check")
@pytest.mark.parametrize("words", ["", *LEAVES])
def test_a_misspelt_option_is_refused_with_the_nearest(words, refused):
    """Also if another option is missing."""
    for option in options_of(LEAVES.get(words, command_parser())):
        misspelt = f"{option[:3]}x{option[3:]}"
        assert f"unknown option {misspelt!r}: did you mean {option!r}? allowed: --help" in refused(
            f"{words} {misspelt}"
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "COMMAND is missing: allowed: quantize, compare"),
        ("recipes shwo", "invalid choice: 'shwo': did you mean 'show'?"),
        ("--json formats", "unknown option '--json'"),
        ("--traceback formats", "options of a command follow its name"),
        ("compile a.pt2 --device cdua", "invalid choice: 'cdua': did you mean 'cuda'? allowed: cpu, cuda"),
        ("export-onnx a.pt2 --output a.onnx --target quork", "invalid choice: 'quork': did you mean 'quark'?"),
        ("export-onnx a.pt2 --output a.onnx --opset new", "argument --opset: invalid int value: 'new'"),
        ("compile a.pt2 -d cuda", "unknown option '-d'"),
        ("quantize --mo", "--model: expected one argument"),
        ("quantize --recipe mxfp8", "the following arguments are required: --model"),
        ("formats mxfp4", "unrecognized arguments: mxfp4"),
    ],
)
def test_wrong_lines(line, message, refused):
    assert message in refused(line)


def test_a_wrong_dtype_is_refused_with_the_nearest(refused):
    lines = [name for name, parser in LEAVES.items() if "--dtype" in options_of(parser)]
    assert set(lines) == {"quantize", "compare", "sensitivity", "generate", "perplexity", "convert-checkpoint"}
    for line in lines:
        expected = "argument --dtype: invalid choice: 'float61': did you mean 'float16'? allowed: float32, float16, bfl"
        assert expected in refused(f"{line} --dtype float61")


@pytest.mark.parametrize("options", ["", "--json", "--traceback --json"])
def test_recipes_without_an_action_lists_them(options):
    alone, named = (command_parser().parse_args(f"recipes {action} {options}".split()) for action in ("", "list"))
    assert alone.run.args == named.run.args == ("pt2mx.pt2e.cli.recipes", "run_list") and alone.json == named.json


def test_help_of_a_command_with_actions_is_its_own(capsys):
    with pytest.raises(SystemExit):
        command_parser().parse_args(["recipes", "--help"])
    assert "show" in capsys.readouterr().out


@pytest.mark.compiled_except("sensitivity", "compile", "perplexity")
@pytest.mark.parametrize("words", LEAVES)
def test_an_option_given_twice_is_refused_or_keeps_both_values(words, refused):
    parser = LEAVES[words]
    positional = ["x"] * sum(not action.option_strings for action in parser._actions)
    for name, action in parser._option_string_actions.items():
        if not name.startswith("--") or action.nargs == 0:
            continue
        value = "1" if action.type else next(iter(action.choices or ["a"]))
        other = "2" if action.type else [*(action.choices or ["a", "b"])][1]
        line = f"{words} {name} {value} {name}={other}"
        if "several times" in (action.help or "") or action.nargs == "+":
            needed = [
                f"{need}=x" for need, of in parser._option_string_actions.items() if of.required and of is not action
            ]
            options = command_parser().parse_args([*shlex.split(line), *needed, *positional])
            assert getattr(options, action.dest) == [value, other]
        else:
            assert f"{name} is given twice" in refused(line)


@pytest.mark.parametrize("value", ["-1", "-0.5", "-a dash", "--two dashes", "a=b", ""])
def test_values_that_begin_with_a_dash(value):
    assert command_parser().parse_args(["generate", "x", "--prompt", value]).prompt == [value]
    assert command_parser().parse_args(["generate", "x", "--prompt=--top-p"]).prompt == ["--top-p"]


def test_an_option_may_be_cut_short():
    assert command_parser().parse_args(["quantize", "--mod", "minilm"]).model == "minilm"


def test_every_option_has_a_help_text():
    for words, parser in LEAVES.items():
        assert all(action.help for action in parser._actions), words
        assert not re.search(r"%\(", parser.format_help())


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("compare net --recipes a,b", "recipes", ["a", "b"]),
        ("compare net --recipes a b --speed", "recipes", ["a", "b"]),
        ("compare --recipes a, b net", "recipes", ["a", "b"]),
        ("compare --recipes 'a b' net", "recipes", ["a", "b"]),
        ("compare net --recipes='a, b' c", "recipes", ["a", "b", "c"]),
        ("sensitivity net --formats a b", "formats", ["a", "b"]),
        ("eval net --tasks a b,c", "tasks", ["a", "b", "c"]),
        ("eval net --tasks 'a\tb\n c '", "tasks", ["a", "b", "c"]),
        ("perplexity net --text t --recipe a,b c", "recipe", ["a", "b", "c"]),
        ("quantize --model net --for 'vllm gguf'", "destinations", ["vllm", "gguf"]),
        ("conformance --format mxfp4,mxfp6", "format", ["mxfp4", "mxfp6"]),
        ("perplexity net --text t --recipe 'mxfp4(even, even)' b", "recipe", ["mxfp4(even, even)", "b"]),
    ],
)
def test_names_are_separated_by_commas_or_blanks(line, option, value):
    assert getattr(command_parser().parse_args(shlex.split(line)), option) == value


def test_help_needs_no_model(capsys):
    with pytest.raises(SystemExit) as exit:
        command_parser().parse_args(["perplexity", "--recipe", "a", "-h"])
    assert exit.value.code == 0 and "usage: pt2mx perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["a b", "my own.yaml", "c"], ["a", "b", "my own.yaml", "c"]),
        (["my own.yaml,mxfp8"], ["my own.yaml", "mxfp8"]),
        (["my own.yaml,", "mxfp8"], ["my own.yaml", "mxfp8"]),
        (["mxfp8", ",", "my own.yaml"], ["mxfp8", "my own.yaml"]),
        (["my dir/no.yaml", "my dir/no"], ["my dir/no.yaml", "my dir/no"]),
        (["own.yaml mxfp8", "mxfp8 own.yaml"], ["own.yaml", "mxfp8", "mxfp8", "own.yaml"]),
        (["mxfp4(even,", "even)"], ["mxfp4(even, even)"]),
    ],
)
def test_a_file_may_have_blanks_in_its_name(words, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my own.yaml", "own.yaml"):
        (tmp_path / name).touch()
    assert command_parser().parse_args(["compare", "net", "--recipes", *words]).recipes == names


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("compare minilm --recipes mxfp8,", "--recipes 'mxfp8,'"),
        ("sensitivity net --formats a,,b", "--formats 'a,,b'"),
        ("compare net --mean ,0.5", "--mean ',0.5'"),
        ("eval net --tasks ''", "--tasks ''"),
    ],
)
def test_a_list_has_no_empty_name(line, given, refused):
    assert f"{given} holds an empty name: give names as a,b or a b" in refused(line)


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("compare net --mean=-0.5,-0.4", "mean", ["-0.5", "-0.4"]),
        ("save-checkpoint f --float f --output o --unpack=-x", "unpack", ["-x"]),
    ],
)
def test_values_of_several_that_begin_with_a_dash(line, option, value):
    assert getattr(command_parser().parse_args(line.split()), option) == value


@pytest.mark.parametrize(
    "line",
    [
        "compare net --recipes a b",
        "compare --recipes a b net",
        "compare --speed --recipes=a b --metric kl net",
        "compare --recip a,b --speed net",
        "compare --recipes a --speed b net",
        "compare --recipes a,b net --speed",
        "compare --mean=0.5 --recipes a --recipes b net",
        "perplexity --text t --recipe a b net --tokens 9",
        "save-checkpoint --float f --output o --unpack a b net",
        "recipes show --for vllm net",
    ],
)
def test_the_model_may_come_after_the_names(line):
    options = command_parser().parse_args(line.split())
    model, names = (next(v for name in of if (v := getattr(options, name, None))) for of in (MODELS, LISTS))
    assert (model, names) == ("net", ["vllm"] if "--for" in line else ["a", "b"])


@pytest.mark.parametrize(
    ("line", "example"),
    [
        ("compare --recipes mxfp8 mxfp4", "compare MODEL --recipes"),
        ("compare --recipes 'net mxfp4'", "compare MODEL --recipes"),
        ("compare --recipes a net --mean 0.5 0.4", "compare MODEL --mean"),
        ("compare --recipes mxfp8 --mean 0.4 0.5", "compare MODEL --mean"),
        ("compare --std 0.4 0.5,0.6", "compare MODEL --std"),
        ("compare --recipes mxfp8 my.yaml", "compare MODEL --recipes"),
        ("compare --recipes mxfp8 mxfp6,mxfp4", "compare MODEL --recipes"),
        ("perplexity --text t --recipe net", "perplexity FOLDER --recipe"),
        ("recipes show --for vllm gguf", "recipes show RECIPE --for"),
    ],
)
def test_a_model_that_is_missing_or_cannot_be_told_from_the_names(line, example, refused):
    error = refused(line)
    assert " is missing: give it first, as in `pt2mx " in error and f"{example} ...`" in error


def test_help_groups_the_commands():
    """Each in a group, under its heading; and no command is named as the first of a group by mistake."""
    text = command_parser().format_help()
    assert set(GROUPS) <= set(COMMANDS) and next(iter(GROUPS)) == next(iter(COMMANDS))
    lines = [
        text.index(f"\n    {name} ") if f"\n    {name} " in text else text.index(f"\n    {name}\n") for name in COMMANDS
    ]
    assert lines == sorted(lines) and "  use a quantized language model:\n    generate  " in text
    assert all(f"\n\n  {heading}:\n    {name}" in text for name, heading in GROUPS.items())


def test_help_names_no_list_of_recipes():
    """Which `pt2mx recipes` prints."""
    for command in ("quantize", "compare"):
        text = PARSERS[command].format_help()
        assert "`pt2mx recipes`" in " ".join(text.split()) and "cnn_balanced" not in text


def test_words_that_belong_to_no_list_are_refused(refused):
    assert "unrecognized arguments: b" in refused("sensitivity net b")


def test_every_command_that_loads_a_program_or_quantizes_a_model_imports_files():
    programs = {"compile", "slice", "run", "inspect", "export-onnx", "export-executorch", "save-checkpoint"}
    folders = {"generate", "perplexity", "eval"}
    models = {"quantize", "compare", "sensitivity", "recipes check"}
    assert {name for name, leaf in LEAVES.items() if "--import" in options_of(leaf)} == programs | folders | models
