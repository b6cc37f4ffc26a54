"""Presets of other libraries' conventions that differ from pt2mx's defaults, by name.

A preset reproduces a library's documented scale mode, rounding, integer range, axis, and storage of codes and scales.
It does not reproduce bugs: where a library violates the specification, the preset gives the specified value, and
`not_copied` lists the bug.

    scale, data = PRESETS["torchmx"].quantize(x, "mxfp4")  # the bytes that TorchMX stores
    y = PRESETS["torchmx"].fake_quantize(x, "mxint8")
"""

from __future__ import annotations

from pt2mx.preset import Preset

__all__ = ["PRESETS", "Preset", "table"]

_ROUNDED_LOG2 = "exponents from a rounded log2 (off by one a few ulps below a power of two)"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "microxcaling",
            "7bc4195",
            "rounds half away from zero unless told otherwise (round='nearest'); a block whose exponent is above what "
            "the scale holds (scale_exp_bits below 8) becomes NaN",
            f"{_ROUNDED_LOG2}; 0.49999997 of a step rounds up; bf16 inputs computed in bf16",
            rounding="half_away",
            overflow_to_nan=True,
        ),
        Preset(
            "microxcaling_flush",
            "7bc4195",
            "microxcaling with mx_flush_fp32_subnorms",
            "as microxcaling",
            rounding="half_away",
            overflow_to_nan=True,
            flush_subnormal_blocks=True,
        ),
        Preset(
            "torchao",
            "0.18.0",
            "stores an FP6 code in a byte of its own; NVFP4 multiplies by reciprocals, and its smallest scale is 2**-6",
            f"scale byte 0 halves or flushes values; an Inf leaves the scale finite; RCEIL with {_ROUNDED_LOG2}; codes "
            "in NaN blocks, in FP8 0x7F for a NaN (here 0: the scale byte says it)",
            packed_widths=(4,),
            float_scale_mode="nearest_reciprocal",
        ),
        Preset(
            "torchmx",
            "0.1.0",
            "the first of two FP4 codes in the high nibble; int8 codes are whole numbers, so their scale byte is 6 "
            "lower; stores an FP6 code in a byte of its own",
            "int8 blocks below 2**-121 lose precision",
            int_scale_offset=-6,
            high_nibble_first=True,
            packed_widths=(4,),
        ),
        Preset(
            "quark",
            "0.13",
            "MXFixNeuron: axis 1, int8 down to -128 and by rounding_mode 0 half away from zero, 1 half up, 2 half to "
            "even; floats half to even whatever it says",
            "Inf and NaN pass by value instead of making their block NaN; scales below 2**-127; a tensor of one value "
            "stays as it is",
            rounding_of=(("int8_full", "half_away"),),
            rounding_modes=("half_away", "half_up", "even"),
            axis=1,
            full_range=True,
        ),
        Preset(
            "pychop",
            "0.6.2",
            "blocks over all values in order, whatever the shape; integers down to -2**(bits - 1)",
            f"{_ROUNDED_LOG2}; Inf and NaN by value; -0 becomes +0; its torch backend ignores block_size",
            axis=None,
            full_range=True,
        ),
        Preset(
            "modelopt",
            "a2fbac7",
            "rceil scales; its FP4 packer rounds ties toward zero",
            f"{_ROUNDED_LOG2}; +0 stored as -0 in FP4",
            scale_mode="rceil",
            rounding_of=(("fp4_e2m1", "half_toward_zero"),),
        ),
        Preset(
            "compressed_tensors",
            "0.20.0",
            "the tensor scale of NVFP4 is a divisor (448 * 6 / amax); a block scale that rounds to zero becomes 1/8, "
            "so that its values become zero",
            "a tensor below 2**-116 gets the tensor scale 1, and all its values become zero",
            float_scale_mode="nearest_flush",
            divides_by_tensor_scale=True,
        ),
    )
}


def table() -> str:
    """Return the presets as a table in Markdown: the differences from the defaults, and the bugs that are not copied.

    Returns:
        A heading, a rule, and a line for each preset.

    Example:
        >>> from pt2mx import compat
        >>> for line in compat.table().splitlines()[2:5]:
        ...     print(line[:62])
        | `microxcaling` | 7bc4195 | rounds half away from zero unless
        | `microxcaling_flush` | 7bc4195 | microxcaling with mx_flush_
        | `torchao` | 0.18.0 | stores an FP6 code in a byte of its own
    """
    rows = [("preset", "version", "what differs", "faults not copied"), ("---",) * 4]
    rows += [(f"`{p.name}`", p.version, p.reason, p.not_copied) for p in PRESETS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
