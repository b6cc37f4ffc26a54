"""The parser of the command line, built from the tables of arguments, and the examples at the end of `--help`.

It imports no torch, so it refuses a wrong command line at once and suggests the nearest allowed word.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.cli.arguments import ACTIONS, ARGUMENTS, COMMON, DESTINATIONS, NAMES, YAML, Argument, split_names
from pt2mx.pt2e.quantizer.shipped import check_source
from pt2mx.version import __version__

#: the exit status
BAD_INPUT = 2
_RAW = argparse.RawDescriptionHelpFormatter
#: a word of the command line that names an option; "-1" and "-a text" are values
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_HELP = ("-h", "--help")
#: command -> (task, the command line), the most common task first
EXAMPLES = {
    "quantize": (
        ("quantize a pretrained sentence encoder to FP8", "--model minilm --recipe mxfp8 --output minilm.pt2"),
        (
            "quantize your own model: net.py has a function make()",
            "--model net.py:make --recipe mxfp4 --calibration batches",
        ),
        (
            "quantize your own CNN, with a folder of images",
            "--model net.py:make --recipe mxfp8 --calibration photos --image-size 32 --mean 0.5 --std 0.5",
        ),
        (
            "quantize a language model to 4 bits",
            "--model hf:HuggingFaceTB/SmolLM2-135M-Instruct --recipe mxfp4_decoder --output smollm2",
        ),
        (
            "train the 4-bit weights on a text; the same command goes on after a stop",
            "--model hf:HuggingFaceTB/SmolLM2-135M-Instruct --recipe mxfp4 --optimize balanced --distill text.txt "
            "--distill-checkpoint state --output trained",
        ),
        (
            "write a page with the error of every operator",
            "--model torchvision:resnet18 --recipe mxfp6 --report resnet18.html",
        ),
    ),
    "slice": (
        (
            "turn an INT8 program into one with FP4 weights",
            "minilm.pt2 --recipe mxfp4_weight_only --output fp4.pt2",
        ),
        ("slice a language model", "smollm2 --recipe decoder_balanced --output smollm2-fp6"),
    ),
    "compile": (
        ("make a package for the processors of this machine", "minilm.pt2 --output minilm.aoti.pt2"),
        ("make one that runs without pt2mx", "minilm.pt2 --output minilm.aoti.pt2 --portable"),
        ("make a language model's packages, in its folder", "smollm2"),
    ),
    "generate": (
        ("answer a question", 'smollm2 --chat --prompt "What is the capital of France?"'),
        ("hold a conversation from the keyboard, and sample", "smollm2 --chat --temperature 0.7 --top-p 0.9"),
        ("compare with the float model", 'smollm2 --prompt "Once" --float HuggingFaceTB/SmolLM2-135M-Instruct'),
        ("transcribe a recording", "whisper-tiny --audio speech.wav"),
    ),
    "perplexity": (
        ("compare with the checkpoint", "smollm2 --text book.txt --float HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("compare recipes", "HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt --recipe mxfp8 mxfp4_decoder"),
    ),
    "eval": (
        ("answer the questions of a benchmark", "smollm2 --tasks arc_easy,hellaswag --batch-size 8"),
        ("try your own tasks, described by YAML files", "smollm2 --tasks my_task --include-path tasks --limit 20"),
    ),
    "compare": (
        ("try all recipes on a model", "minilm"),
        ("try some, and time them beside float32 and bfloat16", "net.py:make --recipes mxfp8,mxfp6,mxfp4 --speed"),
    ),
    "sensitivity": (
        ("list the most sensitive modules", "minilm"),
        ("suggest a recipe of 4.5 bits per weight", "minilm --bits 4.5 --output minilm.yaml"),
    ),
    "run": (
        ("time a package with the inputs of the export", "minilm.aoti.pt2"),
        ("run your own batch, and keep the outputs", "minilm.aoti.pt2 --inputs batch.pt --output embeddings.pt"),
        ("time it beside its program in float32 and bfloat16", "minilm.aoti.pt2 --benchmark --float minilm.pt2"),
        ("run an ONNX file in OpenVINO", "minilm.onnx --inputs batch.pt --runtime openvino"),
    ),
    "inspect": (
        ("print formats, bytes and operators of a file", "minilm.pt2"),
        ("print JSON for a script", "minilm.aoti.pt2 --json"),
    ),
    "export-onnx": (
        ("write nodes of pt2mx's own domain", "minilm.pt2 --output minilm.onnx"),
        ("write standard operators, for OpenVINO", "minilm.pt2 --output minilm.onnx --target openvino"),
        ("write a decoder with the keys and values of the past as inputs", "smollm2 --output smollm2.onnx"),
    ),
    "export-executorch": (
        ("write a file for ExecuTorch's portable kernels", "net.pt2 --output net.pte"),
        ("plan memory for batches of up to 8", "minilm.pt2 --output minilm.pte --max-size 8"),
        ("delegate to XNNPACK what it takes", "net.pt2 --output net.pte --backend xnnpack"),
    ),
    "save-checkpoint": (
        (
            "write a checkpoint for other engines, and say which load it",
            "smollm2 --float HuggingFaceTB/SmolLM2-135M-Instruct --output smollm2-mxfp4",
        ),
    ),
    "convert-checkpoint": (
        ("quantize file by file, in the memory of one shard", "Qwen3-8B Qwen3-8B-mxfp4"),
        ("use another recipe, and convert two shards at a time", "Qwen3-8B Qwen3-8B-mxfp8 --recipe mxfp8 --jobs 2"),
        ("keep the codes of MXFP4 as NVFP4", "Qwen3-8B-mxfp4 Qwen3-8B-nvfp4 --layout modelopt"),
    ),
    "card": (
        ("print the card of a folder", "smollm2"),
        (
            "add a perplexity that `pt2mx perplexity --json` printed",
            "smollm2 --measured perplexity.json --output smollm2/README.md",
        ),
        ("name the float model, for the Hub", "smollm2 --base-model HuggingFaceTB/SmolLM2-135M-Instruct"),
    ),
    "recipes": (
        ("list the shipped recipes", ""),
        ("print one to start your own from", "show mxfp4_decoder"),
        ("print what a recipe selects in a model", "check mine.yaml --model minilm"),
    ),
    "formats": (
        ("print the table", ""),
        ("print JSON for a script", "--json"),
    ),
    "conformance": (
        ("check what is installed", ""),
        ("check two libraries in one format", "--implementation torchao gguf --format mxfp4 --output scores.md"),
    ),
    "demo": (
        ("run what `make demo` runs, in a few minutes", ""),
        ("write to another folder", "--output ~/mx-demo"),
    ),
    "doctor": (
        ("list what is missing, and the command that repairs it", ""),
        ("print JSON for a bug report", "--json"),
    ),
    "completion": (
        ("complete in bash, from ~/.bashrc", "bash > ~/.pt2mx.bash && echo 'source ~/.pt2mx.bash' >> ~/.bashrc"),
        ("complete in zsh, from a folder of $fpath", 'zsh > "${fpath[1]}/_pt2mx"'),
        ("complete in fish", "fish > ~/.config/fish/completions/pt2mx.fish"),
    ),
}


def _is_recipe(word: str) -> bool:
    """Return whether a word can only be meant as a recipe or a format: a YAML file, or no file or folder."""
    if word.endswith(YAML):
        return True
    try:
        check_source(word)
    except MXError:
        return False
    return not os.path.exists(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


#: option with several values -> whether a name can only be one of them
_IS_VALUE: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("recipe", "recipes", "formats"), _is_recipe),
    **dict.fromkeys(("mean", "std"), _is_number),
    "destinations": DESTINATIONS.__contains__,
}


def _are_values(option: argparse.Action, word: str) -> bool:
    """Return whether a word can only hold values of an option."""
    is_value = _IS_VALUE.get(option.dest, lambda name: False)
    return all(map(is_value, filter(None, split_names([word]))))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that suggests the nearest allowed word."""

    #: the action of a command line without one; None: an action is required
    default_action: str | None = None

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"pt2mx: error: {message}; see `{self.prog} --help`\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        if self.default_action is not None and all(_OPTION.fullmatch(word) and word not in _HELP for word in words):
            words = [self.default_action, *words]
        self._check_words(words)
        options, rest = super().parse_known_args(self._in_order(words), namespace)
        for action in self._actions:
            if action.metavar == NAMES and (given := getattr(options, action.dest, None)):
                names = split_names(given)
                if not all(names):
                    text = f"{action.option_strings[0]} {','.join(names)!r} holds an empty name"
                    self.error(f"{text}: give names as a,b or a b")
                setattr(options, action.dest, names)
        return options, rest

    def _in_order(self, words: list[str]) -> list[str]:
        """Return the words with the one that belongs to no option in front: after `--recipes a b` argparse would take
        it for a recipe. Further words that belong to no option go to the last option with several values."""
        if subparsers(self) or not {"--", *_HELP}.isdisjoint(words):
            return words
        words = [part for word in words for part in self._parts_of(word)]
        free: list[int] = []
        values: dict[argparse.Action, list[int]] = {}
        option = None
        for i, word in enumerate(words):
            if name := _OPTION.fullmatch(word.partition("=")[0]):
                option = self._action(name[0])
                option = None if option.nargs == 0 or "=" in word else option
            elif option is None:
                free.append(i)
            elif option.nargs == "+":
                values.setdefault(option, []).append(i)
            else:
                option = None
        positionals = [action for action in self._actions if not action.option_strings]
        if not positionals or not values or len(free) == 1:
            return words
        last = [*values.values()][-1]
        if free:
            first = free[0] if free[0] < last[0] else free[-1]
        else:
            first = self._taken_from(values, words, positionals[0])
        line, further = [words[first]], [words[i] for i in free if i != first]
        for i, word in enumerate(words):
            line += [word] * (i != first and i not in free) + further * (i == last[-1])
        return line

    def _parts_of(self, word: str) -> list[str]:
        """Return `--recipes=a` as two words, after which argparse takes more values. Alone, -a would be an option."""
        name, sign, value = word.partition("=")
        is_option = sign and _OPTION.fullmatch(name) and not value.startswith("-")
        return [name, value] if is_option and self._action(name).nargs == "+" else [word]

    def _taken_from(
        self, values: Mapping[argparse.Action, list[int]], words: list[str], positional: argparse.Action
    ) -> int:
        """Return the index of the word that belongs to no option, among the values of options."""
        ends = [(option, places[-1]) for option, places in values.items() if len(places) > 1]
        if len(ends) != 1 or _are_values(ends[0][0], words[ends[0][1]]):
            name, option = positional.dest, [*values][-1].option_strings[0]
            self.error(f"{name} is missing: give it first, as in `{self.prog} {name.upper()} {option} ...`")
        return ends[0][1]

    def _check_words(self, words: list[str]) -> None:
        """Refuse a missing command, unknown options, and options that are given twice.

        argparse takes the last of two values, and reports an unknown option only where nothing else is wrong."""
        inner, seen = subparsers(self), set()
        for word in itertools.takewhile(lambda word: word != "--", words):
            if not (name := _OPTION.fullmatch(word.partition("=")[0])):
                if inner:
                    return  # the rest is for the command's parser
                continue
            action = self._action(name[0])
            if isinstance(action, argparse._HelpAction | argparse._VersionAction):
                return
            if action in seen and action.nargs != 0 and not isinstance(action, argparse._AppendAction):
                self.error(f"{action.option_strings[0]} is given twice, and takes one value")
            seen.add(action)
        if inner:
            (commands,) = (action for action in self._actions if action.choices is inner)
            self.error(f"{commands.metavar} is missing: allowed: {', '.join(inner)}")

    def _action(self, name: str) -> argparse.Action:
        """Return the action of an option, whose name may be abbreviated."""
        options = self._option_string_actions
        whole = name if name.startswith("--") else name[:2]  # "-hx" is "-h -x"
        known = [option for option in options if option.startswith(whole)]
        if not known:
            allowed = nearest(name, [option for option in options if option.startswith("--")])
            hint = "; options of a command follow its name" if subparsers(self) else ""
            self.error(f"unknown option {name!r}: {allowed}{hint}")
        return options[whole if whole in options else known[0]]

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a value that is not among the choices and suggest the nearest; argparse's own method suggests none."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}: {nearest(value, action.choices)}")


class _Grouped(_RAW):
    """Help in which headings group the commands; `headings` has the heading in front of a command."""

    def __init__(self, headings: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._headings = headings

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):  # without a line of its own
            return "".join(map(self._format_action, self._iter_indented_subactions(action)))
        heading = self._headings.get(action.dest)
        return (f"\n  {heading}:\n" if heading else "") + super()._format_action(action)


def make_parser(commands: Mapping[str, tuple[str, str]], groups: Mapping[str, str], epilog: str = "") -> Parser:
    """Return the parser of the command line. Its options have the command as `command`, and its function as `run`.

    Args:
        commands: command -> ("module:function", the help text); a command with actions has `function_ACTION` for each.
        groups: the first command of each group -> the heading of the group in the help text.
        epilog: the end of the help text.
    """
    text = "Quantize PyTorch models to the OCP MX formats."
    formatter: Any = partial(_Grouped, groups)
    parser = Parser(prog="pt2mx", description=text, epilog=epilog, formatter_class=formatter)
    parser.set_defaults(parser=parser)  # for the completion of shells
    parser.add_argument("--version", action="version", version=f"pt2mx {__version__}")
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (function, text) in commands.items():
        description, examples = f"{text[0].upper()}{text[1:]}.", examples_text(name)
        command = inner.add_parser(name, help=text, description=description, epilog=examples, formatter_class=_RAW)
        if name in ACTIONS:
            command.default_action = next(iter(ACTIONS[name]))
            actions = command.add_subparsers(required=True, metavar="ACTION")
            for action, (text, arguments) in ACTIONS[name].items():
                _fill(actions.add_parser(action, help=text), name, f"{function}_{action}", arguments)
        else:
            _fill(command, name, function, ARGUMENTS.get(name, ()))
    return parser


def subparsers(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    """Return the parsers of a parser's commands by name."""
    choices = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(choices, {})


def _fill(parser: Parser, command: str, function: str, arguments: Iterable[Argument]) -> None:
    for names, options in (*arguments, *COMMON):
        parser.add_argument(*names, **options)
    module, name = function.split(":")
    parser.set_defaults(command=command, run=partial(_run, module, name))


def _run(module: str, function: str, options: argparse.Namespace) -> Any:
    return getattr(importlib.import_module(module), function)(options)


def examples_text(command: str) -> str:
    """Return the examples of a command, with which its `--help` ends."""
    lines = [f"  # {task}\n  pt2mx {command} {line}".rstrip() for task, line in EXAMPLES[command]]
    return "\n".join(["examples:", *lines])
