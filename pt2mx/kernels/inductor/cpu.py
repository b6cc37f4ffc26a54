"""The functions of `pt2mx.kernels.elements` for Inductor's C++, to the bit.

In Inductor's vectorized C++, a view of floats as integers goes through memory, one number at a time. One view takes
several times as long as all the arithmetic here. So values are rounded and decoded by exact float arithmetic, and only
values shared by a block are viewed as bits. A GPU needs none of this, because views are free there, and must not use
it, because Triton fuses `a * b - c`.
"""

from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims, lowering
from torch._inductor.graph import SubgraphLowering
from torch._inductor.ir import Pointwise, StorageBox, TensorBox
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as inductor_ops
from torch.utils._python_dispatch import _disable_current_modes

from pt2mx.formats import ElementFormat
from pt2mx.kernels import elements
from pt2mx.kernels.packing import has_length
from pt2mx.modes import ROUNDINGS

divide, scale_bytes = elements.divide, elements.scale_bytes

#: operators that compute nothing: they are hints to Inductor's lowering
for _name in ("realize", "realize_if_costly"):
    torch.library.define(f"pt2mx::{_name}", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"pt2mx::{_name}", "CompositeExplicitAutograd", torch.clone)
    torch.library.register_fake(f"pt2mx::{_name}", torch.empty_like)


def _values_of(codes: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes]


torch.library.define("pt2mx::look_up", "(Tensor codes, float[] values) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.impl("pt2mx::look_up", "CompositeExplicitAutograd", _values_of)
torch.library.register_fake("pt2mx::look_up", lambda codes, _: torch.empty_like(codes, dtype=torch.float32))

#: Inductor's names of operations that take longer than writing a value and reading it back
_COSTLY = {"erf", "exp", "log", "pow", "sigmoid", "tanh"}


@lowering.register_lowering(torch.ops.pt2mx.realize, type_promotion_kind=None)
def _realize(x: TensorBox) -> TensorBox:
    """Compute x into memory, in the dimension order that suits its users. Otherwise Inductor would inline the
    computation of x into each user."""
    x = lowering.clone(x)
    x.realize()
    return x


@lowering.register_lowering(torch.ops.pt2mx.realize_if_costly, type_promotion_kind=None)
def _realize_if_costly(x: TensorBox) -> TensorBox:
    """Compute x into memory if that is costly: otherwise the block's amax and its quantization would each compute
    it."""
    computed = x.data.data if isinstance(x.data, StorageBox) else None
    if isinstance(computed, Pointwise) and _COSTLY & computed.inner_fn_opcount().used_ops:
        x.realize()
    return x


@lowering.register_lowering(torch.ops.pt2mx.look_up, type_promotion_kind=None)
def _look_up(codes: TensorBox, values: list[float]) -> TensorBox:
    """Read values from a table, without a test of the codes, which are below its length."""
    with _disable_current_modes():
        table = V.graph.add_tensor_constant(torch.tensor(values, dtype=torch.float32))
    name, graph = table.get_name(), V.graph
    while isinstance(graph, SubgraphLowering):  # torch 2.13 gives the code of a branch no constants but the program's
        for of_graph in ("constants", "constant_reprs", "allocated_constant_name"):
            getattr(graph.parent, of_graph)[name] = getattr(graph, of_graph)[name]
        graph = graph.parent
    read_code, read_table = codes.make_loader(), table.make_loader()

    def value(index: list[Any]) -> Any:
        return read_table([inductor_ops.indirect_indexing(read_code(index), len(values), check=False)])

    return Pointwise.create(
        device=codes.get_device(), dtype=torch.float32, inner_fn=value, ranges=list(codes.get_size())
    )


def realize_if_costly(x: Tensor) -> Tensor:
    """Return x, which both the scale of a block and its values need."""
    return torch.ops.pt2mx.realize_if_costly(x)


def realize(shared: Tensor) -> Tensor:
    """Return values shared by a block, (..., blocks, 1, ...), computed once per block, not for each value."""
    return torch.ops.pt2mx.realize(shared)


def times_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    return elements.times_pow2(blocks, scale - elements.BIAS, scale != elements.NAN_SCALE, realize)


def from_blocks(blocks: Tensor, axis: int, length: int) -> Tensor:
    """(..., blocks, block, ...) -> (..., length, ...), in the memory order that its user asks for.

    A plain view would be written in the order of the blocks' dimensions, and copied for a convolution, which needs
    channels last.

    Ragged blocks are written out, contiguous, before they are cut: Inductor's C++ loop splitting
    (`CppScheduling.try_loop_split`, torch 2.11 to 2.13) turns a loop over n values that reads a scale at `i // block`
    into `n // block` whole blocks and drops the rest.
    """
    x = blocks.flatten(axis, axis + 1)
    x = x if axis == x.dim() - 1 else torch.ops.pt2mx.realize(x)
    if has_length(x, axis, length):
        return x
    if all(isinstance(n, int) for n in x.shape):
        x = inductor_prims.force_stride_order(x, torch._prims_common.make_contiguous_strides_for(x.shape))
    else:  # flat: torch 2.11 cannot put symbolic strides in order
        x = inductor_prims.force_stride_order(x.reshape(-1), (1,)).view(x.shape)
    return x.narrow(axis, 0, length)


def round_to_element(v: Tensor, element: ElementFormat, rounding: str, random: Tensor | None = None) -> Tensor:
    """v: fp32 in units of the block's scale -> a neighbouring value of the element, saturated."""
    binade = _binade(v).clamp(min=2.0**element.emin)
    if rounding == "even":
        # in the binade of this number one ulp is a quantum: adding it rounds, ties to even
        rounder = binade * (1.5 * 2.0 ** (23 - element.mantissa_bits))
        p = (v + rounder) - rounder
    else:
        quantum = binade * 2.0**-element.mantissa_bits
        p = ROUNDINGS[rounding].to_quanta(v / quantum, random) * quantum
    p = p.clamp(element.lowest, element.max_normal)
    # two's complement has no negative zero
    return torch.where(p == 0, 0.0, p) if element.is_int else torch.copysign(p, v)


def _binade(v: Tensor) -> Tensor:
    """2**floor(log2 |v|) of a normal |v| below 2**103, exactly; nothing may be fused to a multiply-add here.

    Source: S. M. Rump, T. Ogita, S. Oishi, "Accurate floating-point summation part I: faithful rounding", SIAM J. Sci.
    Comput. 31 (2008): the unit in the first place.
    """
    q = v * (2.0**23 + 1)
    return (q - q * (1 - 2.0**-24)).abs()


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """codes: int32 in [0, 2**bits) -> their values in fp32. Codes that share bytes are decoded one by one, because no
    vector instruction reads their bytes; there a table is faster than arithmetic."""
    if element.bits < 8:
        return torch.ops.pt2mx.look_up(codes, elements.values_of_codes(element))
    return elements.decode(codes, element, _finite_magnitude)


def _finite_magnitude(magnitude: Tensor, element: ElementFormat) -> Tensor:
    """magnitude: int32, codes without their sign -> values in fp32, as if there were no Inf and NaN.

    A power of two is a shifted integer of at most 30 bits; further factors supply the rest of the exponent.
    """
    m = element.mantissa_bits
    binade = ((magnitude >> m) - 1).clamp(min=0)  # subnormals share the first binade
    quanta, reach, last = magnitude - (binade << m), 30 - m, element.emax - element.emin + 1
    value = (quanta << binade.clamp(max=reach)).to(torch.float32) * 2.0 ** (element.emin - m)
    for shifted in range(reach, last, 30):
        value = value * (1 << (binade - shifted).clamp(0, 30)).to(torch.float32)
    return value
