"""Convolutions of quantized images by packed weights (`conv2d_mx`) against oneDNN's of the same values, on the CPU.

    python -m tests.benchmarks.convolutions [--format mxfp8] [--repeats 20]

Milliseconds, in turns, of oneDNN in float32 and bfloat16, with its weight in its preferred order, and of ours with
results in both. The ratio compares float32 results. The errors are of float32 results against float64.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import pt2mx
from pt2mx.ops.convolution import conv2d_mx
from tests.benchmarks.measure import Row, medians_in_turns, run_formats
from tests.compare import relative_error

#: channels, their number in the result, height and width of the image, kernel, stride, padding: layers of ResNet-18;
#: first layers of ResNet, vision transformers, ConvNeXt and MobileNet; few channels inside of a model
_SIZES = (
    *((64, 64, 56, 3, 1, 1), (128, 128, 28, 3, 1, 1), (256, 256, 14, 3, 1, 1), (512, 512, 7, 3, 1, 1)),
    *((3, 64, 224, 7, 2, 3), (3, 768, 224, 16, 16, 0), (3, 96, 224, 4, 4, 0), (3, 32, 224, 3, 2, 1)),
    *((3, 64, 64, 5, 1, 2), (16, 64, 56, 3, 1, 1)),
)
_IMAGES = 8


@torch.no_grad()
def measured(device: str, spec: pt2mx.MXSpec, repeats: int) -> Iterator[Row]:
    for channels, n, size, kernel, stride, padding in _SIZES:
        x = pt2mx.fake_quantize_mx(torch.randn(_IMAGES, size, size, channels), spec)
        scale, data = pt2mx.quantize_mx(torch.randn(n, kernel, kernel, channels), spec)
        weight = pt2mx.dequantize_mx(data, scale, spec, length=channels).permute(0, 3, 1, 2).contiguous()
        images, moves = x.permute(0, 3, 1, 2), ([stride] * 2, [padding] * 2, [1, 1])
        modes = (data, scale, None, spec.element.name, spec.block_size, *moves)
        dtypes = torch.float32, torch.bfloat16
        theirs = [_onednn(images.to(dtype), weight.to(dtype), *moves) for dtype in dtypes]
        ours = [partial(conv2d_mx, x.bfloat16(), *modes, dtype) for dtype in dtypes]
        wide, narrow, own_wide, own_narrow = (1e3 * t for t in medians_in_turns([*theirs, *ours], repeats))
        exact = F.conv2d(images.double(), weight.double(), None, stride, padding)
        errors = relative_error(theirs[0](), exact), relative_error(ours[0]().permute(0, 3, 1, 2), exact)
        yield {
            "size": f"{channels} to {n}, {size}x{size}, {kernel}x{kernel} by {stride}",
            **{"float32": wide, "bfloat16": narrow, "ours": own_wide, "ours in bfloat16": own_narrow},
            **{"ratio": own_wide / wide, "error": f"{errors[0]:.1e}", "of ours": f"{errors[1]:.1e}"},
        }


def _onednn(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> partial[Tensor]:
    mkldnn = torch.ops.mkldnn
    ordered = mkldnn._reorder_convolution_weight(weight, padding, stride, dilation, 1, x.shape)
    rest = (None, padding, stride, dilation, 1, "none", [], "")
    return partial(mkldnn._convolution_pointwise, x, ordered, *rest)


if __name__ == "__main__":
    run_formats("tests.benchmarks.convolutions", __doc__, measured, devices=("cpu",))
