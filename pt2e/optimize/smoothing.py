"""Products with smoothed inputs: large channels are divided, and the weight's columns multiplied, by powers of two.

Sources: SmoothQuant (Xiao et al., arXiv:2211.10438) for inputs that are quantized, AWQ (Lin et al., arXiv:2306.00978)
for those that are not. The input's part goes into what computes it where `folding` proves that possible, and into a
`div` elsewhere, one for all the products that read a tensor. Powers of two change no rounding of the float model, save
of values that leave the normal range of their dtype: channels are left alone in which that would show (`keeps_bits`).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.algorithms import Smoothing
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.attributes import register_buffer
from pt2mx.fx.graph.constants import evaluate
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.optimize.equivalent_transforms import BITS, Inputs, can_change_coordinates, first_of, read_instead
from pt2mx.pt2e.optimize.folding import Folder
from pt2mx.pt2e.optimize.matmul_views import Product
from pt2mx.pt2e.optimize.observers import MXHessianObserver
from pt2mx.pt2e.optimize.targets import Reader, Site, set_weight

#: exponents of factors
_LEAST, _LARGEST = -4, 10
#: how many times as large as in calibration an input may become
_ROOM = 16
_Pair = tuple[Site, Product]


@torch.no_grad()
def smooth_products(model: GraphModule, sites: list[Site], inputs: Inputs, options: Smoothing) -> dict[Node, str]:
    """Smooth the products of weights that linear layers and matrix products alone read. Changes `model`, and replaces
    the observers of the smoothed inputs. Gives for each product the parameters into which its input's part went, or
    "div"."""
    written, folder = written_nodes(model.graph), Folder(model, any(site.in_place for site in sites))
    where: dict[Node, str] = {}
    for source, pairs in _by_source(sites, written, options).items():
        readers = [reader for site, _ in pairs for reader in site.readers]
        exponents = _exponents(model, pairs, inputs[readers[0].node], options) if _seen(readers, inputs) else None
        if exponents is None or not exponents.any():
            continue
        factor = torch.exp2(exponents)
        for site, product in pairs:
            site.value = evaluate(model, site.node)  # what was folded into it
            matrices = product.layout.to_matrices(site.value) * factor.to(site.value.dtype)
            set_weight(model, site, product.layout.from_matrices(matrices, site.value.shape))
        alone = set(source.users) == {reader.node for reader in readers} and all(map(_reads_once, readers))
        folded = folder.fold(source, 1 / factor) if alone else []
        if not folded:
            _divide(model, source, factor, readers)
        smoothed: dict[int, MXHessianObserver] = {}
        for reader in readers:
            observer = inputs[reader.node]
            inputs[reader.node] = smoothed.setdefault(id(observer), _divided(observer, factor))
            where[reader.node] = ", ".join(folded) or "div"
    return where


def _by_source(sites: list[Site], written: set[Node], options: Smoothing) -> dict[Node, list[_Pair]]:
    """The weights whose products all read one tensor, by that tensor."""
    found: dict[Node, list[_Pair]] = {}
    for site in sites:
        if any(reader.node.graph is not site.node.graph for reader in site.readers):
            continue  # export gives graphs inside no buffers, which the inputs' part may need
        products = can_change_coordinates(site, written)
        sources = {product.source for product in products}
        if len(sources) == 1 and all(_gains(reader, options) for reader in site.readers):
            found.setdefault(sources.pop(), []).append((site, products[0]))
    return {source: pairs for source, pairs in found.items() if source.target is not hadamard}


def _gains(reader: Reader, options: Smoothing) -> bool:
    if reader.activation is None:
        return options.weight_only and reader.spec.element.bits < BITS
    return reader.activation.element.bits < BITS


def _seen(readers: list[Reader], inputs: Inputs) -> bool:
    observers = [inputs.get(reader.node) for reader in readers]
    return all(one is not None and one.amax is not None and len(one.amax) == 1 for one in observers)


def _exponents(model: GraphModule, pairs: list[_Pair], seen: MXHessianObserver, options: Smoothing) -> Tensor | None:
    """The exponents of the factors by which the weights' columns are multiplied, (K,) float32 integers."""
    if seen.amax is None or not seen.amax.isfinite().all():
        return None
    values = [(evaluate(model, site.node), product.layout) for site, product in pairs]
    columns = torch.stack([layout.to_matrices(value).float().abs().amax((0, 1)) for value, layout in values])
    weight, x = columns.amax(0), seen.amax[0].float()
    power = 0.0 if all(reader.activation is None for site, _ in pairs for reader in site.readers) else 1.0
    log = options.strength * x.log2() - power * (1 - options.strength) * weight.log2()
    used = (x > 0) & (weight > 0)
    if not used.any():
        return None
    exponents = torch.where(used, log - log[used].median(), 0.0).round().clamp(_LEAST, _LARGEST)
    kept = keeps_bits(x, -exponents, pairs[0][1].source.meta["val"].dtype)
    kept &= keeps_bits(columns, exponents, values[0][0].dtype).all(0)
    return torch.where(kept, exponents, 0.0)


def keeps_bits(largest: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """True where multiplying values up to `largest` by two to the power of `exponents` keeps their bits: values up to
    `_ROOM` times as large do not overflow, and those that become subnormal, below 2**-14 in float16, lose less than the
    square of the dtype's precision, relative to the largest."""
    limits, scaled = torch.finfo(dtype), largest * torch.exp2(exponents)
    above = (exponents <= 0) | (scaled <= limits.max / _ROOM)
    return above & ((exponents >= 0) | (scaled >= limits.tiny / limits.eps) | (largest == 0))


def _divided(observer: MXHessianObserver, factor: Tensor) -> MXHessianObserver:
    """The observer of an input divided by a factor, (K,)."""
    divided = copy.copy(observer)
    parts = zip(observer.parts, factor.split(observer.parts[0].shape[-1]), strict=True)
    divided.parts = [part / (f[:, None] * f).to(part.device) for part, f in parts]
    divided.amax = None if observer.amax is None else observer.amax / factor
    return divided


def _reads_once(reader: Reader) -> bool:
    """True if the product reads its input nowhere else, as a bias for example."""
    return reader.product is not None and list(reader.node.args).count(reader.product.source) == 1


def _divide(model: GraphModule, source: Node, factor: Tensor, readers: list[Reader]) -> None:
    """Give readers the source divided by a factor: a `mul` could be quantized itself."""
    value = factor.to(source.meta["val"].dtype)
    with model.graph.inserting_before(first_of(reader.node for reader in readers)):
        buffer = model.graph.get_attr(register_buffer(model, f"{source.name}_smoothing", value))
    buffer.meta["val"] = source.meta["val"].new_empty(value.shape)
    positions = [(reader.node, reader.product.position) for reader in readers if reader.product is not None]
    read_instead(positions, torch.ops.aten.div.Tensor, (source, buffer))
