"""The command `pt2mx card`, and the cards of folders that other commands write. This module imports no torch."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.arguments import ARGUMENTS
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.card import card, read_object, write_card
from pt2mx.pt2e.files.card_metadata import OWN, README, known_metadata
from pt2mx.pt2e.files.output import write_text

_MEASURED = "what `pt2mx perplexity --json` printed, or `pt2mx eval --output` wrote"
#: field of `pt2mx perplexity --json` -> its name in a card
_OF_TEXTS = {
    "perplexity": "perplexity",
    "divergence": "KL divergence from the float model, nats",
    "agreement": "share of tokens with the same most likely next one",
}
#: options that change nothing in the output
_ASIDE = ("report", "full")


def run(options: argparse.Namespace) -> Result:
    metadata = known_metadata(options.folder)
    given = {"base_model": options.base_model, "license": options.license}
    metadata |= {key: value for key, value in given.items() if value is not None}
    own = metadata.setdefault(OWN, {})
    if options.name is not None:
        own["name"] = options.name
    if options.measured:
        own["measured"] = _merged(own.get("measured", ()), options.measured)
    text = card(options.folder, metadata, report=options.report)
    write_text(text, options.output)
    printed = text.rstrip() if options.output is None else f"{options.output}: {len(text.encode()):,} bytes"
    return Result(printed, {"card": text, "output": options.output})


def _merged(known: Iterable[dict[str, Any]], paths: Iterable[str]) -> list[dict[str, Any]]:
    """Return the figures of a card with those in files, which replace figures of the same text or task."""
    rows = [row for path in paths for row in _measured_in(path)]
    try:
        return list({(row["what"], row["on"]): row for row in (*known, *rows)}.values())
    except (KeyError, TypeError):
        raise MXError(f"the figures in the metadata of {README} are not those that pt2mx writes: remove them") from None


def _measured_in(path: str) -> list[dict[str, Any]]:
    """Return the figures in a file as rows of a card: what, on what, of the float model, of this one."""
    content = read_object(path, _MEASURED)
    try:
        return list((_of_tasks if "results" in content else _of_text)(content))
    except (AttributeError, KeyError, TypeError) as error:
        raise MXError(f"{path!r} is not {_MEASURED}: {type(error).__name__}: {error}") from None


def _of_text(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    models = {row["model"]: row for row in content["models"]}
    reference = models.pop("float", {})
    if len(models) != 1:
        raise MXError(f"a card is of one quantized model, and the file has {', '.join(models) or 'none'}")
    (model,) = models.values()
    on = f"{content['text']}, {content['tokens']:,} tokens"
    for field, what in _OF_TEXTS.items():
        if model[field] is not None:
            compared = {} if reference.get(field) is None else {"float": reference[field]}
            yield {"what": what, "on": on, **compared, "here": model[field]}


def _of_tasks(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, values in content["results"].items():
        shots = (content.get("n-shot") or {}).get(task)
        on = task if shots is None else f"{task}, {shots}-shot"
        for name, value in values.items():
            metric, comma, _ = name.partition(",")  # "acc,none", and "acc_stderr,none" for its error
            if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
                yield {"what": metric, "on": on, "here": value}


def describe_output(options: argparse.Namespace, *names: str, **known: Any) -> None:
    """Write the card of the folder `options.output`, with the command that made it.

    Args:
        options: the options of the command.
        names: the folders or names on the Hub of what it was made of, the float model first.
        **known: what else is known, as `write_card` takes it.
    """
    from pt2mx.pt2e.models.hub import origin_of  # imports torch

    write_card(options.output, map(origin_of, names), command=command_line(options), **known)


def command_line(options: argparse.Namespace) -> str:
    """Return the command line of options, without those that change nothing in the output.

    An absolute path is written as its last part: a card should not tell where files were on a machine.
    """
    return " ".join(["pt2mx", options.command, *_words(options)])


def _words(options: argparse.Namespace) -> Iterator[str]:
    for names, settings in ARGUMENTS[options.command]:
        field = settings.get("dest") or names[0].removeprefix("--").replace("-", "_")
        value = getattr(options, field)
        if field in _ASIDE or value in (settings.get("default"), None, False):
            continue
        values = value if isinstance(value, list) else [value]
        words = [] if value is True else [shlex.quote(_shown(one)) for one in values]
        if not names[0].startswith("--"):
            yield from words
        elif settings.get("action") == "append":
            yield from (f"{names[0]} {word}" for word in words)
        else:
            yield " ".join([names[0], *words])


def _shown(value: Any) -> str:
    kind, colon, path = str(value).rpartition(":")
    return f"{kind}{colon}{Path(path).name}" if os.path.isabs(path) else str(value)
