"""The model card of a folder, README.md, made of its files and of metadata. This module imports no torch."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.files.archive import read_record
from pt2mx.pt2e.files.card_metadata import (
    OWN,
    README,
    RECIPE,
    REPORT,
    TERMS,
    Folder,
    Origin,
    copy_files,
    head_of,
    is_own,
    made_of,
    may_write_card,
    metadata_of,
)
from pt2mx.pt2e.files.output import write_text
from pt2mx.version import __version__

_PROGRAMS = "program*.pt2"
#: the files with weights
_WEIGHTS = ("*.safetensors", _PROGRAMS, "encoder.pt2")
_TEXT, _IMAGES, _SPEECH = "text-generation", "image-text-to-text", "automatic-speech-recognition"
#: end of an architecture's name, or type of a model -> its task on the Hub
_TASKS = {
    "ForCausalLM": _TEXT,
    "LMHeadModel": _TEXT,
    "whisper": _SPEECH,
    "moonshine": _SPEECH,
}
#: task -> the arguments of `pt2mx generate`
_GENERATE = {_IMAGES: '--image photo.jpg --prompt "What does the image show?"', _SPEECH: "--audio speech.wav"}
_PROMPT = '--prompt "What is the capital of France?"'
_ROLES = {"weight": "weights", "activation": "inputs"}
_PROGRAM_CODE = """\
from pt2mx import LanguageModel

model = LanguageModel.from_pretrained("{name}")  # a folder, or a name on the Hub
print(model.generate(text="The capital of France is", max_new_tokens=32, do_sample=False))"""
_CHECKPOINT_CODE = """\
import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained("{name}")  # a folder, or a name on the Hub
model = transformers.AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")
tokens = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=32, do_sample=False)[0]))"""


def write_card(
    folder: Folder,
    origins: Iterable[Origin | None],
    *,
    name: str | None = None,
    command: str | None = None,
    engines: Mapping[str, str] | None = None,
    report: Folder | None = None,
    codes: Folder | None = None,
) -> None:
    """Write the card of a folder, and copy the terms of the models that it was made of.

    A README.md that pt2mx did not write stays.

    Args:
        folder: the folder, complete but for the card.
        origins: the models that it was made of, the float model first; None is for one that is not known.
        name: its name in the card; None: the name of the folder.
        command: the command that made it of the last one.
        engines: engine -> what it is known to do with the checkpoint.
        report: a report in JSON; None: the one in the folder.
        codes: the folder of a model with the same codes, whose recipe and report are copied; None: there is none.

    Raises:
        MXError: where no file can be written there.
    """
    path, known = Path(folder), [origin for origin in origins if origin is not None]
    for origin in known:
        if origin.folder is not None:
            copy_files(origin.folder, path, TERMS, replace=True)
    if codes is not None and is_own(metadata_of(codes)):
        copy_files(codes, path, (RECIPE, REPORT), replace=False)
    if not may_write_card(path):
        return
    metadata = made_of(known)
    own = metadata.setdefault(OWN, {})
    if command is not None:
        own["commands"] = [*own.get("commands", ()), command]
    if engines:
        own["engines"] = dict(engines)
    write_text(card(path, metadata, name, report), path / README)


def card(folder: Folder, metadata: dict[str, Any], name: str | None = None, report: Folder | None = None) -> str:
    """Return the text of a folder's card.

    Args:
        folder: a folder that `save_pretrained` or `save_checkpoint` wrote.
        metadata: what is known of it, as `known_metadata` returns it.
        name: its name in the card; None: the one in the metadata, or of the folder.
        report: a report in JSON; None: the one in the folder, if it has any.

    Raises:
        MXError: for a folder of no model, and a report that cannot be read.
    """
    path = Path(folder)
    config = read_object(path / "config.json", "the folder of a quantized model")
    if report is None and (path / REPORT).is_file():
        report = path / REPORT
    facts = _Facts(
        name=name or metadata.get(OWN, {}).get("name") or Path(os.path.abspath(path)).name,
        folder=path,
        config=config,
        report={} if report is None else _read_report(report),
        metadata=metadata,
        own={"version": __version__, **metadata.get(OWN, {})},
    )
    if not facts.is_program and facts.layout is None:
        raise MXError(
            f"{str(folder)!r} holds no quantized model: give a folder that `pt2mx quantize` or `pt2mx save-checkpoint` "
            "wrote"
        )
    try:
        sections = [section(facts) for section in (_about, _use, _figures, _measured, _made, _terms)]
        head = head_of(facts.completed())
    except (AttributeError, KeyError, TypeError) as error:
        raise MXError(
            f"the metadata of the card of {str(folder)!r}, or the report, are not those that pt2mx writes: "
            f"{type(error).__name__}: {error}; mend {README}, or remove it"
        ) from None
    return "\n\n".join([f"{head}\n# {facts.name}", *filter(None, sections)]) + "\n"


@dataclass(frozen=True)
class _Facts:
    """The facts of a card.

    Args:
        name: of the model; a name on the Hub has a slash.
        folder: its files.
        config: its config.json.
        report: its report; empty without one.
        metadata: what is known beside.
        own: those under `pt2mx`.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    report: Mapping[str, Any]
    metadata: Mapping[str, Any]
    own: Mapping[str, Any]

    @property
    def local(self) -> str:
        """The name of a folder with the model."""
        return self.name.rpartition("/")[2]

    @property
    def base(self) -> str | None:
        """The name of the float model."""
        base = self.metadata.get("base_model") or self.own.get("base")
        return base[0] if isinstance(base, list) else base

    @property
    def ranks(self) -> int:
        """The number of ranks that run a program; 0 for a checkpoint."""
        return len([*self.folder.glob(_PROGRAMS)])

    @property
    def is_program(self) -> bool:
        return self.ranks > 0

    @property
    def layout(self) -> str | None:
        """The layout of a checkpoint."""
        layout: str | None = (self.config.get("quantization_config") or {}).get("quant_method")
        return layout

    @property
    def task(self) -> str | None:
        """The task on the Hub."""
        if "vision_config" in self.config and (self.folder / "encoder.pt2").is_file():
            return _IMAGES
        names = [str(self.config.get("model_type")), *map(str, self.config.get("architectures") or ())]
        known = (task for end, task in _TASKS.items() if any(name.endswith(end) for name in names))
        is_decoder = self.is_program and not self.config.get("is_encoder_decoder")
        return next(known, _TEXT if is_decoder else self.metadata.get("pipeline_tag"))

    @property
    def continues_text(self) -> bool:
        """True where it takes a text, and continues it."""
        has_tokenizer = (self.folder / "tokenizer_config.json").is_file()
        return has_tokenizer and self.task == _TEXT and not self.config.get("is_encoder_decoder")

    @property
    def engines(self) -> Mapping[str, str]:
        engines: Mapping[str, str] = self.own.get("engines", {})
        return engines

    def quantized(self, role: str) -> Iterator[Mapping[str, Any]]:
        """Yield the quantized operands of a role in the report."""
        for operator in self.report.get("operators", ()):
            for operand in operator["operands"]:
                if operand["role"] == role and operand["spec"]:
                    yield operand

    def formats(self, role: str) -> list[str]:
        """Return the formats of a role, the most frequent first, without blocks and scales, such as "mxfp4"."""
        counts = Counter(re.split(r"[_{(]", operand["spec"])[0] for operand in self.quantized(role))
        return [name for name, _ in counts.most_common()]

    def completed(self) -> dict[str, Any]:
        """Return the metadata, with those that follow from the files."""
        tags = [*self.metadata.get("tags", ()), OWN, *self.formats("weight"), self.layout]
        result = {
            **self.metadata,
            "base_model_relation": "quantized" if "base_model" in self.metadata else None,
            "library_name": OWN if self.is_program else "transformers",
            "pipeline_tag": self.task,
            "tags": [tag for tag in dict.fromkeys(tags) if tag],
            OWN: self.own,
        }
        return {key: value for key, value in result.items() if value is not None}


def _about(facts: _Facts) -> str:
    base = facts.base or "A model"
    if "base_model" in facts.metadata:
        base = f"[{base}](https://huggingface.co/{base})"
    parts = []
    for role, name in _ROLES.items():
        if formats := facts.formats(role):
            parts.append(f"{name} in {', '.join(formats).upper()}")
    text = f"{base} with {' and '.join(parts)}" if parts else base
    text += f", quantized by pt2mx {facts.own['version']}."
    if facts.is_program:
        return f"{text} The folder holds a program of PyTorch, with its weights as codes and scales, that pt2mx runs."
    engines = "; ".join(f"{engine} {does}" for engine, does in facts.engines.items())
    return f"{text} The folder is a checkpoint in the layout {facts.layout}{': ' if engines else ''}{engines}."


def _use(facts: _Facts) -> str:
    """Return the commands and the code that use the model."""
    commands = [*(_program_commands if facts.is_program else _checkpoint_commands)(facts)]
    if "/" in facts.name:
        commands.insert(1, f"hf download {facts.name} --local-dir {facts.local}")
    texts = ["## Use", _block("bash", commands)]
    if facts.continues_text and facts.ranks < 2:
        code = _PROGRAM_CODE if facts.is_program else _CHECKPOINT_CODE
        texts.append(_block("python", [code.format(name=facts.name)]))
    return "\n\n".join(texts)


def _program_commands(facts: _Facts) -> Iterator[str]:
    yield "pip install './pt2mx[hf]'  # a checkout of pt2mx, or its wheel"
    pt2mx = "pt2mx" if facts.ranks == 1 else f"torchrun --nproc-per-node {facts.ranks} -m pt2mx"
    chat = "--chat " if (facts.folder / "chat_template.jinja").is_file() else ""
    if facts.continues_text or facts.task in _GENERATE:
        yield f"{pt2mx} generate {facts.local} {_GENERATE.get(facts.task or '', chat + _PROMPT)}"
    if facts.continues_text and facts.ranks == 1:
        yield f"pt2mx perplexity {facts.local} --text book.txt" + (f" --float {facts.base}" if facts.base else "")


def _checkpoint_commands(facts: _Facts) -> Iterator[str]:
    yield "pip install transformers" + " compressed-tensors" * (facts.layout == "compressed-tensors")
    if any(engine.startswith("vLLM") and does.startswith("loads") for engine, does in facts.engines.items()):
        yield f"vllm serve {facts.name}"
    yield f"pt2mx quantize --model hf:{facts.local} --output {facts.local}-pt2mx  # the same codes"


def _figures(facts: _Facts) -> str:
    """Return the sizes and the noise, as far as they are known."""
    size = sum(file.stat().st_size for pattern in _WEIGHTS for file in facts.folder.glob(pattern))
    rows = [["files with weights, bytes", "", f"{size:,}"]]
    report = facts.report
    if report and facts.ranks == 1:  # a checkpoint may hold weights as values, and a report of ranks is of the first
        before, after = report["bytes_before"], report["bytes_after"]
        rows.append(["parameters, bytes", f"{before:,}", f"{after:,}"])
        bits = [f"{8 * nbytes / report['values']:.2f}" for nbytes in (before, after)]
        rows.append(["bits a parameter, with scales", *bits])
    texts = ["## Figures", _table(["", "float model", "here"], rows)]
    if report:
        operators = report["operators"]
        quantized = sum(any(operand["spec"] for operand in operator["operands"]) for operator in operators)
        noise = filter(None, (_noise(facts, role) for role in _ROLES))
        texts.append(" ".join([f"{quantized} of {len(operators)} operators are quantized.", *noise]))
    return "\n\n".join(texts)


def _noise(facts: _Facts, role: str) -> str:
    """Return a sentence on the noise of a role; empty where none was measured."""
    seen = [operand["statistics"] for operand in facts.quantized(role) if operand["statistics"]]
    sqnr = [one["sqnr"] for one in seen if one["sqnr"] is not None]
    if not sqnr:
        return ""
    spread = f"{min(sqnr):.1f} to {max(sqnr):.1f} dB, median {statistics.median(sqnr):.1f} dB"
    return f"SQNR of their {_ROLES[role]}: {spread}."


def _measured(facts: _Facts) -> str:
    rows = []
    for row in facts.own.get("measured", ()):
        compared = f"{row['float']:.4g}" if "float" in row else ""
        rows.append([row["what"], row["on"].replace("|", "\\|"), compared, f"{row['here']:.4g}"])
    return "## Measured\n\n" + _table(["", "on", "float model", "here"], rows) if rows else ""


def _made(facts: _Facts) -> str:
    """Return the commands that made the model, and its recipe."""
    texts = []
    if commands := facts.own.get("commands"):
        texts.append(_block("bash", commands))
    if recipe := _recipe_in(facts.folder):
        texts += ["The recipe:", _block("yaml", [recipe.rstrip()])]
    return "\n\n".join(["## How it was made", *texts]) if texts else ""


def _recipe_in(folder: Path) -> str | None:
    """Return the recipe in a folder, or the one that its program records."""
    if (folder / RECIPE).is_file():
        return (folder / RECIPE).read_text(encoding="utf-8")
    for program in sorted(folder.glob(_PROGRAMS)):
        record = read_record(program, "extra/pt2mx.json") or b"{}"
        try:
            recipe: str | None = json.loads(record).get("recipe")
        except (ValueError, AttributeError):  # a broken record, as `inspect` says
            return None
        return recipe
    return None


def _terms(facts: _Facts) -> str:
    files = sorted(file.name for pattern in TERMS for file in facts.folder.glob(pattern))
    name = facts.metadata.get("license_name") or facts.metadata.get("license")
    known = [str(name)] * bool(name) + [f"[{file}]({file})" for file in files]
    return f"## License\n\nThat of the float model: {', '.join(known)}." if known else ""


def _block(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _read_report(path: Folder) -> dict[str, Any]:
    content = read_object(path, "a report that `pt2mx quantize` wrote")
    if missing := {"operators", "values", "bytes_before", "bytes_after"} - content.keys():
        raise MXError(f"{str(path)!r} is no report that `pt2mx quantize` wrote: it has no {min(missing)}")
    return content


def read_object(path: Folder, what: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: the file.
        what: what to give, for the message of an error.

    Raises:
        MXError: where it cannot be read, and for other JSON.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MXError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}; give {what}") from None
    if not isinstance(content, dict):
        raise MXError(f"cannot read {str(path)!r}: it holds no JSON object; give {what}")
    return content
