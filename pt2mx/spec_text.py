"""The texts of specs: the spellings that the field uses, and the one that `str(spec)` gives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pt2mx.errors import MXError, nearest
from pt2mx.formats import FORMATS, is_element
from pt2mx.modes import ROUNDINGS, scale_modes
from pt2mx.scale_formats import SCALE_FORMATS, is_scale_format, parse_scale_format

if TYPE_CHECKING:
    from pt2mx.spec import MXSpec

#: the block size of blocks as long as the row
ROW = 2**63 - 1
#: prefix of an element -> the scale format that it says, and the block size where none is named
_PREFIXES = {"mx": ("e8m0", 32), "nv": ("e4m3_f32", 16)}
_PREFIX_OF = {scale_format: prefix for prefix, (scale_format, _) in _PREFIXES.items()}

# MXFP8[E4M3]{32}, mxint8{64,-2}, fp8_e4m3{128x128}(f32), int4{row}(bf16), mxfp4{32}(ceil,up,e5m0)
_SPEC = re.compile(
    rf"(?P<prefix>{'|'.join(_PREFIXES)})?(?!mx|nv)(?P<element>[^{{(]+?)\s*"
    r"(?:\{(?:(?P<rows>\d{1,19})x)?(?P<block>\d{1,19}|row)(?:,(?P<axis>-?\d{1,19}))?\})?"
    r"(?:\((?P<modes>\w+(?:,\w+)*)?\))?",
    re.ASCII,
)
# BFP[8|8]{64,-1}(SN): integer element bits | scale bits, block, axis, (S)ymmetric or _, and the rounding letter
_BFP = re.compile(
    r"bfp\[(?P<bits>\d{1,3})\|(?P<scale>\d{1,3})\](?P<rest>\{.*\}|)(?:\((?P<symmetry>[s_])(?P<rounding>[a-z])\))?",
    re.ASCII,
)
# BFP16, BFP12_64, BFP16A_64: bits of an element and of the exponent, `A` for the full range, and the block
_BFP_NAME = re.compile(
    r"bfp(?P<bits>\d\d)(?P<full>a?)(?:_(?P<block>\d{1,19}))?(?P<rest>(?:\{.*\})?(?:\(.*\))?)", re.ASCII
)
#: d-Matrix's block sizes of the names that come without one
_BFP_BLOCKS = {"16": 64, "12": 128}
_BFP_ROUNDINGS = {"n": "even", "s": "stochastic", "u": "up", "d": "down"}
_SCALE = re.compile(r"e(\d{1,3})m(\d{1,3})", re.ASCII)


def text_of(spec: MXSpec) -> str:
    """Return the text of a spec, without its axis; `fields_of_text` reads it."""
    defaults = ((spec.scale_mode, spec.scale_format.scale_mode), (spec.rounding, "even"))
    words = [m for m, default in defaults if m != default]
    if words == ["even"]:  # the scale mode of that name
        words = ["even", "even"]
    prefix = _PREFIX_OF.get(spec.scale_format.name, "")
    if not prefix:
        words.append(spec.scale_format.name)
    elif spec.scale_bits != spec.scale_format.bits or spec.scale_sig_bits:
        words.append(f"e{spec.scale_exp_bits}m{spec.scale_sig_bits}")
    rows = f"{spec.block_rows}x" if spec.block_rows > 1 else ""
    size = "row" if spec.block_size == ROW else spec.block_size
    return f"{prefix}{spec.element}{{{rows}{size}}}" + (f"({','.join(words)})" if words else "")


def fields_of_text(spelling: str) -> tuple[str, dict[str, Any]]:
    """Return the element and the fields of `MXSpec` that a text names (`pt2mx.parse`); MXError for another text."""
    text, fields = _as_integer(spelling)
    match = _SPEC.fullmatch(text)
    if match is None:
        raise MXError(f"unknown MX format {spelling!r}: {nearest(spelling, [f'mx{n}{{32}}' for n in FORMATS])}")
    if prefix := match["prefix"]:
        fields["scale_format"], fields["block_size"] = _PREFIXES[prefix]
    for key, group in (("block_rows", "rows"), ("block_size", "block"), ("axis", "axis")):
        if match[group] is not None:
            fields[key] = ROW if match[group] == "row" else int(match[group])
    try:
        fields.update(_modes([word for word in (match["modes"] or "").split(",") if word], prefix))
    except MXError as error:
        raise MXError(f"in {spelling!r}: {error}") from None
    if prefix == "nv" and not is_element(match["element"]):
        known = ["nvfp4", *(f"nv{name}" for name in FORMATS)]
        raise MXError(f"unknown element format in {spelling!r}: {nearest(text, known)}")
    # `parse_element` takes `mx` too, and its errors then name what was written
    return ("mx" if prefix == "mx" else "") + match["element"], fields


def _as_integer(spelling: str) -> tuple[str, dict[str, Any]]:
    """Return a spelling in lower case, with an integer format in place of a shorthand of block floating point, and the
    fields of `MXSpec` that the shorthand names."""
    text = spelling.strip().lower()
    if named := _BFP_NAME.fullmatch(text):
        block = named["block"] or ("" if "{" in named["rest"] else _BFP_BLOCKS.get(named["bits"], ""))
        full = "_full" if named["full"] else ""
        return f"int{int(named['bits']) - 8}{full}" + (f"{{{block}}}" if block else "") + named["rest"], {}
    bfp = _BFP.fullmatch(text)
    if bfp is None:
        return text, {}
    fields: dict[str, Any] = {"scale_exp_bits": int(bfp["scale"])}
    if bfp["rounding"]:
        if bfp["rounding"] not in _BFP_ROUNDINGS:
            raise MXError(
                f"unknown rounding letter {bfp['rounding'].upper()!r} in {spelling!r}: allowed: "
                + ", ".join(f"{k.upper()} ({v})" for k, v in _BFP_ROUNDINGS.items())
            )
        fields["rounding"] = _BFP_ROUNDINGS[bfp["rounding"]]
    full = "_full" if bfp["symmetry"] == "_" else ""
    return f"int{bfp['bits']}{full}{bfp['rest']}", fields


def _modes(words: list[str], prefix: str | None) -> dict[str, Any]:
    """Return the fields that the words in parentheses name: a scale mode, a rounding, and the scale format or the
    widths of an E8M0 scale. Behind the prefix `mx` E4M3 and E5M3 are such widths."""
    fields: dict[str, Any] = {}
    last = words[-1] if words else ""
    if not prefix and is_scale_format(last):
        fields["scale_format"] = parse_scale_format(last)
        words = words[:-1]
    elif prefix != "nv" and (scale := _SCALE.fullmatch(last)):
        fields["scale_exp_bits"], fields["scale_sig_bits"] = int(scale[1]), int(scale[2])
        words = words[:-1]
    elif prefix and is_scale_format(last):
        raise MXError(f"the prefix {prefix!r} says {_PREFIXES[prefix][0]} scales: leave it out for {last} scales")
    modes = scale_modes(fields.get("scale_format") or SCALE_FORMATS[_PREFIXES[prefix or "mx"][0]])
    if len(words) == 1 and words[0] in ROUNDINGS and words[0] not in modes:
        return {**fields, "rounding": words[0]}
    if len(words) > 2:
        raise MXError(f"at most a scale mode, a rounding and a scale format go into the parentheses, not {words}")
    if last and not prefix and not fields and last not in {*modes, *ROUNDINGS}:
        known = [*modes, *ROUNDINGS, *SCALE_FORMATS]
        raise MXError(f"unknown mode or scale format {last!r}: {nearest(last, known)}")
    return {**fields, **dict(zip(("scale_mode", "rounding"), words, strict=False))}
