"""The faults: signs, axes, off-by-one, exchanged scales, forgotten clones and conditions."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """`before`, which a file holds once, becomes `after`."""

    path: str
    before: str
    after: str

    def changed(self, root: Path = ROOT) -> str:
        """Return the text of the file with the fault."""
        text = (root / self.path).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.path} holds {self.before!r} {text.count(self.before)} times: name one place")
        return text.replace(self.before, self.after)


_KERNELS = "pt2mx/kernels"
_SOURCES = "pt2mx/kernels/cpu/src"

FAULTS = (
    # kernels
    Fault(f"{_KERNELS}/exponent_scales.py", "(threshold + _MANTISSA + 1) >> 1", "(threshold + _MANTISSA) >> 1"),
    Fault(f"{_KERNELS}/elements.py", "magnitude > element.max_code + element.has_inf", "magnitude > element.max_code"),
    Fault(f"{_KERNELS}/reference.py", "(v > spec.element.max_normal)", "(v >= spec.element.max_normal)"),
    Fault(f"{_KERNELS}/reference.py", "(position & 3) == lane", "(position & 1) == lane"),
    Fault(f"{_KERNELS}/packing.py", "groups.select(axis + 1, i) << (8 * i)", "groups.select(axis + 1, i) << (4 * i)"),
    Fault(f"{_KERNELS}/hadamard.py", "for shift in (8, 4, 2):", "for shift in (4, 2):"),
    Fault(f"{_KERNELS}/float_scales.py", "(amax < torch.inf) & (t >= least)", "(amax <= torch.inf) & (t >= least)"),
    Fault(f"{_KERNELS}/codebooks.py", "nearest if nearest >= number", "nearest if nearest > number"),
    Fault(f"{_KERNELS}/exponent_scales.py", "if function is not None:", "if False:"),
    Fault(f"{_KERNELS}/scale_search.py", "(v.abs() < 2.0**-126) & (blocks != 0)", "(v.abs() < 2.0**-126)"),
    Fault(
        f"{_KERNELS}/gptq_panel.py",
        "columns, shares, inverse = columns.clone(),",
        "columns, shares, inverse = columns,",
    ),
    Fault(f"{_SOURCES}/quantize.cpp", "e == kNotFinite ? 0x7FC00000 : out1", "out1"),
    Fault(f"{_SOURCES}/error_sums.cpp", "(value < low * s)", "(value < -high * s)"),
    Fault(f"{_SOURCES}/linear_int8.h", "out->offset *= -offset;", "out->offset *= offset;"),
    # passes
    Fault("fx/passes/weight_layout.py", "return axis != codes.dim() - 1", "return True"),
    Fault("fx/passes/fold_weights.py", "value = value.clone()", "pass"),
    Fault("fx/passes/interleave_gates.py", "{(0, n // 2): 0, (n // 2, n): 1}", "{(0, n // 2): 1, (n // 2, n): 0}"),
    Fault("fx/passes/packed_operands.py", "keeps_blocks = axis != 0 and ", "keeps_blocks = "),
    Fault(
        "fx/passes/fuse_qdq.py", "return len(shape) - 1 not in [dim % len(shape) for dim in args[1:3]]", "return True"
    ),
    Fault("fx/passes/fuse_qdq.py", "columns and columns[0] % call.spec.block_size == 0", "columns"),
    Fault("fx/passes/rotate_and_store.py", " and args_of(second)[2] == width // 2", ""),
    Fault("fx/passes/convolutions_as_matmuls.py", "((1,), (0,), (1,))", "((1,), (1,), (1,))"),
    Fault("fx/training/fuse_batch_norm.py", "mean, variance = mean.clone(), variance.clone()", "pass"),
    # observers
    Fault("pt2e/observe/observer.py", "not (self.observe_once and self._observed)", "not self.observe_once"),
    Fault(
        "pt2e/observe/range_observers.py",
        "self.averaging_constant * (seen - average)",
        "self.averaging_constant * seen",
    ),
    Fault(
        "pt2e/observe/range_observers.py", "(values * per_limit * half).floor()", "(values * per_limit * half).round()"
    ),
    Fault("pt2e/observe/tensor_scales.py", "self.amax.clamp(min=0), self.spec", "self.amax, self.spec"),
    # report
    Fault("pt2e/flow/sizes.py", "(int(size) - 1) * int(stride)", "int(size) * int(stride)"),
    Fault("pt2e/report/results.py", "(values.count(value) - 1) / 2", "(values.count(value) - 1)"),
    Fault("pt2e/report/suggest.py", "-(-extra // unit) for extra", "extra // unit for extra"),
    Fault("pt2e/report/advice.py", "sign * row.quality - _error(row)", "sign * row.quality + _error(row)"),
    Fault("pt2e/report/speed.py", "known = 1 / ratio.median", "known = ratio.median"),
    Fault("pt2e/report/speed.py", "ordered[1], ordered[-2]", "ordered[0], ordered[-1]"),
    # model cards
    Fault("pt2e/files/card_metadata.py", "_selected(known[OWN], _INHERITED)", "dict(known[OWN])"),
    Fault("pt2e/files/card.py", "if report and facts.ranks == 1:", "if report:"),
    Fault("pt2e/models/hub.py", '"allow_patterns": _FILES, "ignore_patterns"', '"ignore_patterns"'),
    # checkpoints
    Fault(
        "pt2e/checkpoints/contents.py",
        "for name, tensor in tensors.items() if tied.get(name) not in tensors",
        "for name, tensor in tensors.items()",
    ),
    Fault("pt2e/checkpoints/contents.py", "tensor_scale[rows[0] // user.data.shape[-2]]", "tensor_scale[0]"),
    Fault("pt2e/checkpoints/regroup.py", "elif first <= int(rows[0])", "elif first < int(rows[0])"),
    Fault("pt2e/checkpoints/recode.py", "factor.clone() if form == NVFP4 else factor.reciprocal()", "factor.clone()"),
    Fault("pt2e/checkpoints/convert_shards.py", "first * count // max(1, entry.rows)", "first"),
    Fault(
        "pt2e/checkpoints/quantization_config.py", "nn.Parameter(tied.detach().clone(),", "nn.Parameter(tied.detach(),"
    ),
    Fault("pt2e/checkpoints/gguf_write.py", "-(-self.nbytes // _ALIGNMENT) * _ALIGNMENT", "self.nbytes"),
    # language
    Fault("pt2e/language/step.py", "self._mask = mask.clone()", "self._mask = mask"),
    Fault("pt2e/language/step.py", "self.start.fill_(self.cache.length - 1)", "self.start.fill_(self.cache.length)"),
    Fault("pt2e/language/step.py", "tokens, unfinished = host.clone()", "tokens, unfinished = host"),
    Fault("pt2e/language/step.py", "unfinished & ~stopped", "unfinished"),
    Fault("pt2e/language/compression.py", "(columns < length) & (positions >= 0)", "columns < length"),
    Fault("pt2e/language/recurrence.py", "(recurrent_gate * ~reset).float()", "recurrent_gate.float()"),
    Fault("pt2e/language/positions.py", "last = filled + positions.shape[1] - 1", "last = filled + positions.shape[1]"),
    Fault(
        "pt2e/language/cache.py",
        "tensor.repeat_interleave(batch // len(tensor), 0)",
        "tensor.repeat(batch // len(tensor), *[1] * (tensor.dim() - 1))",
    ),
    Fault(
        "pt2e/language/tensor_parallel.py",
        "parameter.detach().clone() if rank == 0 else torch.zeros_like(parameter)",
        "parameter.detach().clone()",
    ),
    Fault(
        "pt2e/language/sampling.py",
        "scores < 0, scores * penalty, scores / penalty",
        "scores < 0, scores / penalty, scores / penalty",
    ),
)
