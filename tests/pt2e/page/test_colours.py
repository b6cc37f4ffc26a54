"""Text is legible: a contrast of at least 4.5 (WCAG 2.2, AA), in both colour schemes."""

import re
from importlib import resources

import pytest

STYLE = resources.files("pt2mx.pt2e.page").joinpath("page.css").read_text()
SCHEMES = [
    dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=["light", "dark"])
def test_text_and_lines_have_contrast(scheme):
    for ground in ("paper", "raised", "faint"):
        for text in ("ink", "muted", "weight", "bad", "good"):
            assert contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground)
        for mark in ("activation", "focus"):
            assert contrast(scheme[mark], scheme[ground]) >= 3, (mark, ground)


def test_the_measure_itself():
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#777777") == 1
