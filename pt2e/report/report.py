"""`quantization_report`: formats, noise and bytes of each operator, and why others are not quantized."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add, attrgetter
from typing import TYPE_CHECKING, SupportsFloat

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import node_arg
from pt2mx.ops.attention import attention_mx
from pt2mx.pt2e.files.output import json_text, write_text
from pt2mx.pt2e.flow.packed_weights import PACKED_MATMULS
from pt2mx.pt2e.flow.sizes import float_size, size_of, tensors_of
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.converted_size import Conversion
from pt2mx.pt2e.report.results import RecipeComparison, Sensitivity
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport, operator_reports, read_report

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Self

    from pt2mx.pt2e.language.language_model import LanguageModel

_EXACT = "SQNR inf: the format holds each value exactly"
_PLURALS = {"activation": "activations", "weight": "weights", "bias": "biases", "output": "outputs"}

#: the columns of `to_dataframe`: fields of an operator, of the statistics of an operand, of the operand itself
_OF_OPERATOR = ("operator", "name", "module", "source", "quantized", "notes")
_OF_STATISTICS = ("sqnr", "saturated", "flushed")
_OF_OPERAND = ("values", "bytes_before", "bytes_after", "tensor_scale")
COLUMNS = (*_OF_OPERATOR, "role", "format", *_OF_STATISTICS, *_OF_OPERAND)
#: the operand of an operator without any
_NONE = OperandReport("", None, None, {}, 0, 0, 0)

aten = torch.ops.aten
#: operators that read codes and scales directly
_READ_PACKED = (*PACKED_MATMULS, attention_mx)
_GATHERS = (aten.embedding.default, aten.index_select.default, aten.index.Tensor)


@dataclass(frozen=True)
class QuantizationReport:
    """The report of a prepared or converted model.

    It lists, in execution order, every operator that can be quantized and every other matmul, convolution, recurrent
    layer and attention.

    Args:
        operators: an `OperatorReport` for each.
        values: the number of values of the parameters and buffers that the float model reads.
        bytes_before, bytes_after: of the parameters and buffers that the float model and the converted one read.
    """

    operators: tuple[OperatorReport, ...]
    values: int
    bytes_before: int
    bytes_after: int

    def __add__(self, other: QuantizationReport) -> QuantizationReport:
        """Return the report of two models that run one after the other and share no parameters."""
        return QuantizationReport(
            operators=self.operators + other.operators,
            values=self.values + other.values,
            bytes_before=self.bytes_before + other.bytes_before,
            bytes_after=self.bytes_after + other.bytes_after,
        )

    @property
    def operands(self) -> list[OperandReport]:
        """Return the operands of all operators."""
        return [operand for operator in self.operators for operand in operator.operands]

    @property
    def effective_bits(self) -> float:
        """Return the average bits per value over all parameters and buffers, scales included."""
        return 8 * self.bytes_after / self.values if self.values else 0.0

    @property
    def weight_bits(self) -> float:
        """Return the average bits per value over the quantized weights, which `suggest_config` budgets."""
        weights = [operand for operand in self.operands if operand.role == "weight" and operand.spec]
        values = sum(weight.values for weight in weights)
        return 8 * sum(weight.bytes_after for weight in weights) / values if values else 0.0

    def to_table(self, candidates: bool = False) -> str:
        """Return the report as a text table.

        Args:
            candidates: False: one line per operator, a line on SQNRs that are infinite, and one of totals. True: one
                line per operand that an `MXFormatObserver` observed, with the SQNR in dB of each candidate.

        Raises:
            MXError: with `candidates`, if there was no such observer or no batch.
        """
        if candidates:
            return text_table(_candidate_rows(self.operators), left=4)
        header = ("module", "operator", "activation", "weight", "SQNR a", "SQNR w", "bytes", "after")
        table = [header, *map(_row, self.operators)]
        lines = text_table(table, left=4).split("\n")
        width = max(map(len, lines))
        observed = self._roles(observed=True)
        for i, operator in enumerate(self.operators, start=1):
            notes = "; ".join(filter(None, [operator.notes, *_unobserved(operator, observed)]))
            lines[i] = f"{lines[i]:{width}}  {notes}".rstrip()
        if any("inf" in row[4:6] for row in table):
            lines.append(_EXACT)
        return "\n".join([*lines, self.summary])

    def __str__(self) -> str:
        return self.to_table()

    @property
    def summary(self) -> str:
        """Return the totals in a line."""
        quantized = sum(operator.quantized for operator in self.operators)
        text = (
            f"{quantized} of {len(self.operators)} operators quantized; parameters "
            f"{self.bytes_before:,} bytes -> {self.bytes_after:,} ({self.effective_bits:.2f} bits a value)"
        )
        seen = self._roles(observed=True)
        unseen = [_PLURALS.get(role, role) for role in self._roles(observed=False) if role not in seen]
        if unseen:
            which = f" of {' and '.join(unseen)}" if seen else ""
            text += f"; no SQNR{which}: it holds no statistics of a calibration"
        scales = sum(operand.tensor_scale is not None for operand in self.operands)
        if scales:
            text += f"; {scales} static tensor scale{'s' * (scales > 1)} from calibration"
        return text

    def _roles(self, observed: bool) -> list[str]:
        """Return the roles of quantized operands with statistics, or of those without."""
        operands = [operand for operand in self.operands if operand.spec]
        return list(dict.fromkeys(o.role for o in operands if (o.statistics is not None) == observed))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON, and write it to a file at `path`, if it is given.

        A ratio that is not finite becomes null.
        """
        bits = {"effective_bits": self.effective_bits, "weight_bits": self.weight_bits}
        return write_text(json_text({**bits, **asdict(self)}), path)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the report as a table of pandas, which must be installed.

        It has one row per operand, in execution order, and one for an operator without operands. The columns:
        `operator`, `name`, `module`, `source`, `quantized`, `notes` of the operator; `role`, `format`, `sqnr` (dB),
        `saturated` and `flushed` (shares), `values`, `bytes_before`, `bytes_after` and `tensor_scale` of the operand. A
        number that is not known is NaN.
        """
        rows = []
        for operator in self.operators:
            for operand in operator.operands or (_NONE,):
                rows.append(_cells(operator, operand))
        table = import_extra("pandas").DataFrame(rows, columns=list(COLUMNS))
        return table.astype(dict.fromkeys((*_OF_STATISTICS, "tensor_scale"), "float64"))

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read a report that `to_json` wrote. A SQNR that was not finite is NaN.

        Raises:
            MXError: where there is no such file, or it holds something else.
        """
        return cls(**read_report(path))

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model: str = "",
        recipe: str | os.PathLike[str] | MXQuantizer = "",
        quality: Mapping[str, SupportsFloat] | None = None,
        comparison: RecipeComparison | None = None,
        sensitivity: Sensitivity | None = None,
        before: GraphModule | ExportedProgram | None = None,
        after: GraphModule | ExportedProgram | None = None,
    ) -> str:
        """Write the report as one self-contained HTML page: totals, noise by depth, and a table to sort and filter.

        Optional arguments add to the page.

        Args:
            path: of the file; None: no file is written.
            model: the name of the model on the page.
            recipe: the model's recipe, shown to be copied: the name of a shipped one, a YAML file, or the quantizer.
            quality: metric name -> number, the most important first; by default `recipe`'s quality in `comparison`.
            comparison: the result of `pt2mx.compare_recipes`, for the plot of quality against bytes.
            sensitivity: the result of `pt2mx.sensitivity`, for the operators of each module.
            before, after: the exported float model, and the converted or lowered one, for the graph around an operator.

        Returns:
            The text.

        Raises:
            MXError: for other objects, an unknown recipe, and a path at which no file can be written.

        Example:
            >>> import torch, pt2mx
            >>> exported = torch.export.export(torch.nn.Linear(64, 8), (torch.ones(2, 64),)).module()
            >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8")))
            >>> report = pt2mx.quantization_report(converted)
            >>> text = report.to_html(model="a layer", recipe="mxfp8", before=exported, after=converted)
            >>> text.splitlines()[0]
            '<!DOCTYPE html>'
        """
        from pt2mx.pt2e.page.contents import PageContext  # above this folder: loaded where a page is asked for
        from pt2mx.pt2e.page.page import page

        context = PageContext(model, recipe, quality or {}, comparison, sensitivity, before, after)
        return write_text(page(self, context), path)


def quantization_report(model: GraphModule | ExportedProgram | LanguageModel) -> QuantizationReport:
    """Report the formats, noise and bytes of a model's operators, and why others are not quantized.

    Args:
        model: the result of `prepare_pt2e`, `prepare_qat_pt2e` or `convert_pt2e`; the exported program of a converted
            model, as `load_program` returns it; or a `LanguageModel`, of which it reports all programs.

    Returns:
        A `QuantizationReport`: `operators`, one row for each; `values`, `bytes_before` and `bytes_after` of all
        parameters and buffers; `effective_bits`, `weight_bits`; `to_table()`, `to_json(path)` and `to_html(path)`.

    Raises:
        MXError: for another object, and for a model that `lower_to_inductor` returned.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8, bias=False).eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"))
        >>> report = pt2mx.quantization_report(pt2mx.convert_pt2e(prepared))
        >>> [(operand.role, operand.spec) for operand in report.operators[0].operands]
        [('activation', 'mxfp4_e2m1{32}(even,even)'), ('weight', 'mxfp4_e2m1{32}(even,even)')]
        >>> report.bytes_before, report.bytes_after, report.weight_bits
        (2048, 272, 4.25)
    """
    if isinstance(model, ExportedProgram):
        program: ExportedProgram = model
        return quantization_report(program.module(check_guards=False))
    if not isinstance(model, GraphModule):
        # no import of LanguageModel, which brings transformers
        programs: list[ExportedProgram] = getattr(model, "programs", [])
        if not programs:
            raise MXError(
                f"expected a prepared or converted graph module, not {type(model).__name__}: "
                "pass what prepare_pt2e or convert_pt2e returned, its exported program, or a LanguageModel"
            )
        return reduce(add, map(quantization_report, programs))
    _refuse_lowered(model)
    conversion = None
    after = size_of(tensors_of(model).values()).bytes
    if any(isinstance(module, MXObserver) for module in model.modules()):
        conversion = Conversion(model)
        after = conversion.bytes()
    before = float_size(model)
    return QuantizationReport(tuple(operator_reports(model, conversion)), before.values, before.bytes, after)


def _row(operator: OperatorReport) -> tuple[str, ...]:
    specs, sqnrs = [], []
    for role in ("activation", "weight"):
        operands = [operand for operand in operator.operands if operand.role == role]
        specs.append("/".join(dict.fromkeys(operand.spec or "-" for operand in operands)))
        seen = [operand.statistics.sqnr for operand in operands if operand.statistics]
        sqnrs.append(f"{min(seen):.1f}" if seen else "")
    before = sum(operand.bytes_before for operand in operator.operands)
    after = sum(operand.bytes_after for operand in operator.operands)
    sizes = [f"{size:,}" if size else "" for size in (before, after)]
    return (operator.label, operator.operator, *specs, *sqnrs, *sizes)


def _unobserved(operator: OperatorReport, observed: list[str]) -> list[str]:
    """Return a note for each role without statistics that other operators have: `observed`."""
    roles = dict.fromkeys(o.role for o in operator.operands if o.spec and not o.statistics and o.role in observed)
    return [f"{role}: no SQNR, calibration did not reach it" for role in roles]


def _candidate_rows(operators: tuple[OperatorReport, ...]) -> list[tuple[str, ...]]:
    names: dict[str, None] = {}
    rows: list[tuple[list[str], dict[str, str]]] = []
    for operator in operators:
        for operand in operator.operands:
            if operand.candidates:
                names |= dict.fromkeys(operand.candidates)
                sqnrs = {name: f"{seen.sqnr:.1f}" for name, seen in operand.candidates.items()}
                rows.append(([operator.label, operator.operator, operand.role, operand.spec or "-"], sqnrs))
    if not rows:
        raise MXError(
            "no candidates were observed: prepare with observer=MXFormatObserver.with_args(candidates=...) in the "
            "config, and run batches through the prepared model"
        )
    table = [("module", "operator", "operand", "quantized to", *names)]
    for words, sqnrs in rows:
        table.append((*words, *(sqnrs.get(name, "") for name in names)))
    return table


def _cells(operator: OperatorReport, operand: OperandReport) -> tuple[object, ...]:
    """Return a row of `to_dataframe`; a number that is not known is NaN."""
    of_operator = attrgetter(*_OF_OPERATOR)(operator)
    of_statistics = (getattr(operand.statistics, name, math.nan) for name in _OF_STATISTICS)
    return (*of_operator, operand.role, operand.spec, *of_statistics, *attrgetter(*_OF_OPERAND)(operand))


def _refuse_lowered(model: GraphModule) -> None:
    """Raise an `MXError` for a lowered model, in which an operator reads a packed weight."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if node.target in _READ_PACKED or _gathers_codes(node):
                raise MXError(
                    f"{node} reads a packed weight, as lower_to_inductor leaves it: report the converted model, before "
                    "it is lowered; pt2mx.packed_weights lists its packed weights"
                )


def _gathers_codes(node: Node) -> bool:
    """Return True for a dequantization of gathered rows of a packed weight."""
    codes = node_arg(node) if node.target is ops.dequantize_mx else node
    return codes is not node and codes.target in _GATHERS and node_arg(codes).op == "get_attr"
