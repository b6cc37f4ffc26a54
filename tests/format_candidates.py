"""Formats to choose from, and a config whose observers compare them."""

from pt2mx import MXFormatObserver, MXQuantizationConfig

CANDIDATES = ("mxfp4", "mxfp6", "mxfp8", "mxint8")
CONFIG = MXQuantizationConfig(
    weight="mxfp8", activation="mxfp8", observer=MXFormatObserver.with_args(candidates=CANDIDATES)
)
