"""The stages that an architecture goes through."""

import warnings

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2mx
from pt2mx.pt2e.aten.lower import core_decompositions
from pt2mx.pt2e.models.float_models import Batch, call
from tests.flow import bytes_of_tensors, saved, saved_bytes, unused_bytes
from tests.scaled_mm import ScaledMM
from tests.sweep.architecture import Architecture
from tests.sweep.matmul_like import silent

#: least cosine of a compiled model, or one of scaled matmuls, to the eager converted one: another order of sums may
#: move an activation across a rounding boundary, and each layer adds to that
LEAST_COSINE = 0.99

#: methods of `Flow`, in the order in which they are called
STAGES = ("export", "prepare", "convert", "equal", "reload", "listed", "compile")
#: the stages that the others need
NEEDED = STAGES[:4]


class Flow:
    """One architecture in one recipe; each stage raises where it fails."""

    def __init__(self, architecture: Architecture, recipe: str) -> None:
        self.architecture = architecture
        self.recipe = recipe
        self.converted: GraphModule | None = None
        self.quantized: tuple[Tensor, ...] = ()  # outputs of the prepared model with fake quantization on
        self.cosine: float | None = None  # of the compiled to the eager model

    def export(self) -> None:
        module, self.batch = self.architecture.build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries about their own code
            self.program = _export(module, self.batch)
            self.exported = self.program.module()

    def prepare(self) -> None:
        """Observers pass through what they see; only a batch norm that is folded changes the order of sums."""
        self.prepared = pt2mx.prepare_pt2e(self.exported, pt2mx.MXQuantizer.from_recipe(self.recipe))
        self.unquantized = self._run(self.exported)
        cosine = least_cosine(self._run(self.prepared), self.unquantized)
        assert cosine > 0.99999, f"cosine {cosine} to the float model, without fake quantization"

    def convert(self) -> None:
        self.converted = pt2mx.convert_pt2e(self.prepared)

    def equal(self) -> None:
        """Converted is prepared with fake quantization on, to the bit, and not the float model."""
        pt2mx.disable_observer(self.prepared)
        pt2mx.enable_fake_quant(self.prepared)
        self.quantized = self._run(self.prepared)
        assert_same(self._run(self.converted), self.quantized)
        same = [torch.equal(a, b) for a, b in zip(self.quantized, self.unquantized, strict=True)]
        assert not all(same), "the quantized model computes as the float one"

    def listed(self) -> None:
        """Every matmul-like operator is quantized, or in the report with the reason why not."""
        left = silent(self.converted)
        assert not left, f"neither quantized nor listed with a reason: {left}"

    def reload(self) -> None:
        """The loaded file computes as the converted model, and without unused tensors has the bytes of the reports."""
        program = _export(self.converted, self.batch)
        file = saved(program)
        assert_same(self._run(torch.export.load(file).module()), self.quantized)
        written = saved_bytes(self.program), bytes_of_tensors(file)
        files = tuple(size - unused_bytes(of) for size, of in zip(written, (self.program, program), strict=True))
        for model in (self.prepared, self.converted):
            report = pt2mx.quantization_report(model)
            assert (report.bytes_before, report.bytes_after) == files
            assert report.effective_bits == 8 * report.bytes_after / report.values
            rows = [(o.bytes_before, o.bytes_after) for operator in report.operators for o in operator.operands]
            assert all(sum(column) <= size for column, size in zip(zip(*rows, strict=True), files, strict=True))

    def core_aten(self) -> None:
        """Lowered, the program computes as the converted model; in core operators, as torch's decompositions of it."""
        program = _export(self.converted, self.batch)
        assert_same(self._run(pt2mx.lower_to_aten(program, core=False).module()), self.quantized)
        decomposed = self._run(program.run_decompositions(core_decompositions()).module())
        assert_same(self._run(pt2mx.lower_to_aten(program).module()), decomposed)

    def scaled_mm(self) -> None:
        """With scaled matmuls, which a reference computes, the program agrees with the converted model."""
        scaled = pt2mx.lower_to_aten(_export(self.converted, self.batch), matmul="scaled_mm").module()
        with ScaledMM():
            cosine = least_cosine(self._run(scaled), self.quantized)
        assert cosine > LEAST_COSINE, f"cosine {cosine} of scaled matmuls to eager"

    def compile(self) -> None:
        torch._dynamo.reset()
        try:
            self.cosine = least_cosine(self._run(torch.compile(self.converted)), self.quantized)
        finally:
            torch._dynamo.reset()
        assert self.cosine > LEAST_COSINE, f"cosine {self.cosine} of compiled to eager"

    def _run(self, module: nn.Module) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(call(module, self.batch))


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Equal to the bit, and numbers at all."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"output {i} differs"
        assert b.isfinite().all(), f"output {i} is not finite"


def least_cosine(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The least over the floating outputs; one of zeros has no direction."""
    pairs = [(a.flatten(), b.flatten()) for a, b in zip(got, want, strict=True) if b.is_floating_point() and b.any()]
    return min(torch.cosine_similarity(a.double(), b.double(), dim=0).item() for a, b in pairs)


def _export(module: nn.Module, batch: Batch) -> torch.export.ExportedProgram:
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    with torch.no_grad():
        return torch.export.export(module, args, kwargs, strict=False)
