"""The command `pt2mx completion`: generate the script with which a shell completes the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from pt2mx.pt2e.cli.command import command_parser
from pt2mx.pt2e.cli.parser import subparsers
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.quantizer.shipped import names

#: argument -> words that it may take, apart from files
_WORDS = {"recipe": names(), "recipes": names(), "model": ["minilm", "torchvision:", "hf:", "onnx:"]}

#: `cases` match the words before the cursor, the longest command first; where no word completes, a file may
_BASH = """\
_pt2mx() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words="" options=""
    case " ${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}} " in
{cases}
    esac
    if [[ $word == -* ]]; then words=$options; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pt2mx pt2mx"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit"

Path = tuple[str, ...]


def run(options: argparse.Namespace) -> Result:
    script = _SHELLS[options.shell]()
    return Result(script, {"shell": options.shell, "script": script})


def _parsers(parser: argparse.ArgumentParser, path: Path = ()) -> Iterator[tuple[Path, argparse.ArgumentParser]]:
    """Yield a parser and those below it, the deepest first, each with the commands that lead to it."""
    for name, inner in subparsers(parser).items():
        yield from _parsers(inner, (*path, name))
    yield path, parser


def _words(action: argparse.Action) -> Iterable[str]:
    """Return the words that an argument may take; none if it takes a file, or any value."""
    return map(str, action.choices) if action.choices else _WORDS.get(action.dest, ())


def _bash() -> str:
    cases = []
    for path, parser in _parsers(command_parser()):
        before = " ".join(["", *path, ""])
        options = [action for action in parser._actions if action.option_strings]
        values: dict[str, list[str]] = {}
        for action in options:
            if action.nargs != 0:  # it takes a value
                patterns = (f'"{before}"*"{option} "' for option in action.option_strings)
                values.setdefault(" ".join(_words(action)), []).extend(patterns)
        cases += [f'{"|".join(patterns)}) words="{words}" ;;' for words, patterns in values.items()]
        words = [word for action in parser._actions if action not in options for word in _words(action)]
        names = [name for action in options for name in action.option_strings]
        cases.append(f'"{before}"*) words="{" ".join(words)}" options="{" ".join(names)}" ;;')
    return _BASH.format(cases="\n".join(f"    {case}" for case in cases))


def _zsh() -> str:
    return f"{_ZSH}\n{_bash()}"


def _fish() -> str:
    lines = []
    for path, parser in _parsers(command_parser()):
        inner = list(subparsers(parser))
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        unseen = [f"not __fish_seen_subcommand_from {' '.join(inner)}"] if inner else []
        prefix = f"complete -c pt2mx -n {_quoted('; and '.join([*seen, *unseen]))}"
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                lines += [f"{prefix} -f -a {one.dest} -d {_quoted(one.help)}" for one in action._choices_actions]
            elif argument := _fish_argument(action):
                lines.append(f"{prefix}{argument} -d {_quoted(action.help)}")
    return "\n".join(lines)


def _fish_argument(action: argparse.Action) -> str:
    """Return the options of fish's `complete` for an argument: its names, whether a value follows, the words."""
    words = " ".join(_words(action))
    completions = f" -a {_quoted(words)}" if words else ""
    if not action.option_strings:
        return f" -f{completions}" if action.choices else completions
    names = [f" -{'l' if name.startswith('--') else 's'} {name.lstrip('-')}" for name in action.option_strings]
    value = "" if action.nargs == 0 else " -x" if action.choices else " -r"
    return "".join(names) + value + completions


def _quoted(text: str | None) -> str:
    """Return a help text, or words, as a string of fish."""
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"


#: shell -> the function that makes its script
_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
