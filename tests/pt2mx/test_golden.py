"""Compare with recorded results of peer libraries for the same inputs. The manifest in `golden.npz` says where they
follow the specification, and in how many values they deviate."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from mx_conformance.exact import round_value
from pt2mx import ELEMENTS, dequantize_mx, fake_quantize_mx, microxcaling
from pt2mx.compat import PRESETS, Preset
from tests.golden import ENTRIES, GOLDEN

#: the formats of the specification, which have recorded values
RECORDED = [name.partition("/")[2] for name in GOLDEN.files if name.startswith("table/") and name != "table/e8m0"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDINGS = {
    "even": "even",
    "nearest": "half_away",
    "floor": "toward_zero",
    "half_down": "half_toward_zero",
    "half_up": "half_up",
}
LIBRARIES = {"torchao_0180": "torchao", "torchao_main": "torchao", "torchmx_hw": "torchmx"}

#: The manifest says that these follow rceil with exponents from a rounded log2, which the specification lacks: one ulp
#: above max * 2**k they round down.
ROUNDED_LOG2 = {
    ("torchao_0180", "fp6_e3m2", "sat"),
    ("torchao_0180", "fp6_e3m2", "rceiledge"),
    ("torchao_0180", "fp6_e2m3", "sat"),
    ("torchao_0180", "fp6_e2m3", "rceiledge"),
    ("torchao_0180", "fp4_e2m1", "sat"),
    ("torchao_0180", "fp4_e2m1", "rceiledge"),
    ("modelopt", "fp4_e2m1", "sat"),
    ("modelopt", "fp4_e2m1", "rceiledge"),
}


def has_rounded_log2(entry):
    named = (entry["lib"], entry["fmt"], entry["input"]) in ROUNDED_LOG2
    return named and entry["oracle"]["scale_mode"] == "rceil_div_log2"


def arguments(entry):
    """Preset, element and spec fields of a recorded result."""
    name = "microxcaling_flush" if entry.get("flush") else LIBRARIES.get(entry["lib"], entry["lib"])
    preset = PRESETS.get(name) or Preset(name, "", "", "")
    element = entry["fmt"] + ("_full" if "int8_min" in entry["oracle"] else "")
    scale_mode = entry["scale_mode"].removesuffix("_div_log2")
    fields = {"block_size": entry["block"], "scale_mode": scale_mode, "rounding": ROUNDINGS[entry["round"]]}
    return preset, element, fields if preset.axis is None else fields | {"axis": entry["axis"]}


def values(entry):
    preset, element, fields = arguments(entry)
    x = torch.from_numpy(GOLDEN["in/" + entry["input"]])
    if entry["in_dtype"] == entry["out_dtype"]:
        y = preset.fake_quantize(x.to(DTYPES[entry["in_dtype"]]), element, **fields)
    else:  # computed in fp32 whatever the input's dtype
        y = preset.fake_quantize(x, element, **fields).to(DTYPES[entry["out_dtype"]])
    return y.float().numpy()


def differences(got, want):
    return int(((got != want) & ~(np.isnan(got) & np.isnan(want))).sum())


CASES = sorted({(e["lib"], e["fmt"]) for e in ENTRIES if "oracle" in e})


@pytest.mark.parametrize(("lib", "fmt"), CASES)
def test_values_equal_the_peer_but_for_its_known_deviations(lib, fmt):
    """Where the peer deviates, in as many values as the manifest counted."""
    for entry in ENTRIES:
        if (entry["lib"], entry["fmt"]) == (lib, fmt) and "dq" in entry and not has_rounded_log2(entry):
            want = GOLDEN[entry["dq"]]
            different = differences(values(entry).reshape(want.shape), want)
            assert different == entry["oracle_mismatches"], entry
            assert (different == 0) == (entry["expect"] == "exact"), entry


@pytest.mark.parametrize(("lib", "fmt"), CASES)
def test_stored_bytes_equal_the_peers(lib, fmt):
    """Codes of a block with scale byte 255 mean nothing."""
    for entry in ENTRIES:
        if (entry["lib"], entry["fmt"]) == (lib, fmt) and "codes" in entry and entry["expect"] == "exact":
            preset, element, fields = arguments(entry)
            x = torch.from_numpy(GOLDEN["in/" + entry["input"]]).to(DTYPES[entry["in_dtype"]])
            scale, data = preset.quantize(x, element, **fields)
            want_scale, want_data = (torch.from_numpy(GOLDEN[entry[key]]) for key in ("scale", "codes"))
            assert torch.equal(scale.flatten(), want_scale.flatten()), entry
            finite = (scale != 255).repeat_interleave(data.shape[-1] // scale.shape[-1], -1)
            assert torch.equal(data[finite], want_data[finite]), entry
            back = preset.dequantize(data, scale, element, **fields)
            assert torch.equal(back.nan_to_num(7), preset.fake_quantize(x.float(), element, **fields).nan_to_num(7))


def test_quark_rounds_by_number_only_its_integers():
    """The results are recorded for each number; results of floats are equal."""
    numbered = [e for e in ENTRIES if "rounding_mode" in e]
    assert {(e["fmt"], e["rounding_mode"]) for e in numbered} == {(f, n) for f in RECORDED for n in range(3)}
    for entry in numbered:
        spec = PRESETS["quark"].spec(entry["fmt"], entry["rounding_mode"])
        assert spec.rounding == ROUNDINGS[entry["round"]] and spec.element == ELEMENTS[arguments(entry)[1]]


def test_rounded_log2_entries_are_that_and_nothing_else():
    checked = set()
    for entry in ENTRIES:
        if not ("oracle" in entry and "dq" in entry and has_rounded_log2(entry)):
            continue
        x, want = GOLDEN["in/" + entry["input"]], GOLDEN[entry["dq"]]
        element, rounding = ELEMENTS[entry["fmt"]], ROUNDINGS[entry["round"]]
        blocks, wants = x.reshape(-1, entry["block"]), want.reshape(-1, entry["block"])
        quotient = np.abs(blocks).max(1) / np.float32(element.max_normal)
        for block, quantized, ratio in zip(blocks, wants, quotient, strict=True):
            e = int(np.clip(np.ceil(np.log2(ratio)), -127, 127)) if ratio else -127
            scale = Fraction(2) ** e
            exact = [float(round_value(Fraction(float(v)) / scale, element, rounding) * scale) for v in block]
            assert exact == quantized.tolist(), entry
        assert differences(values(entry).reshape(want.shape), want) > 0, entry
        checked.add((entry["lib"], entry["fmt"], entry["input"]))
    assert checked == ROUNDED_LOG2


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e["expect"] == "allclose"], ids=lambda e: e["op"] + e["fmt"])
def test_quantized_operators_agree_with_microxcaling(entry):
    functional = torch.nn.functional
    a, b = (torch.from_numpy(GOLDEN["in/" + entry[key]]) for key in ("a", "b"))
    bias = torch.from_numpy(GOLDEN["in/" + entry["bias"]]) if entry.get("bias") else None
    axis_a, axis_b = {"linear": (-1, -1), "matmul": (-1, -2), "conv2d": (1, 1)}[entry["op"]]
    rounding = ROUNDINGS[entry["round"]]
    a = fake_quantize_mx(a, entry["a_fmt"], entry["block"], axis_a, rounding=rounding)
    # microxcaling takes both operands of a matmul as activations
    b = fake_quantize_mx(
        b, entry["a_fmt" if entry["op"] == "matmul" else "w_fmt"], entry["block"], axis_b, rounding=rounding
    )
    y = {
        "linear": lambda: functional.linear(a, b, bias),
        "matmul": lambda: a @ b,
        "conv2d": lambda: functional.conv2d(a, b, bias, entry.get("stride", 1), entry.get("padding", 0)),
    }[entry["op"]]()
    want = torch.from_numpy(GOLDEN[entry["dq"]])
    assert (y - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e["expect"] == "allclose"], ids=lambda e: e["op"] + e["fmt"])
def test_the_functions_of_microxcaling_agree_with_it(entry):
    a, b = (torch.from_numpy(GOLDEN["in/" + entry[key]]) for key in ("a", "b"))
    bias = torch.from_numpy(GOLDEN["in/" + entry["bias"]]) if entry.get("bias") else None
    formats = {"w_elem_format": entry["w_fmt"], "a_elem_format": entry["a_fmt"]}
    specs = microxcaling.finalize_mx_specs({**formats, "block_size": entry["block"], "round": entry["round"]})
    size = {key: entry[key] for key in ("stride", "padding") if key in entry}
    y = getattr(microxcaling, entry["op"])(a, b, bias, mx_specs=specs, **size)
    want = torch.from_numpy(GOLDEN[entry["dq"]])
    assert (y - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_tables_of_values_are_ours():
    for name in RECORDED:
        element = ELEMENTS[name]
        codes = torch.arange(1 << element.bits, dtype=torch.uint8)
        table = GOLDEN["table/" + name].astype(np.float32)
        scale = torch.full((1 << element.bits,), 127, dtype=torch.uint8)
        data = codes.unsqueeze(1)
        if element.bits == 6:
            data = torch.stack([codes, torch.zeros_like(codes), torch.zeros_like(codes)], 1)
        got = dequantize_mx(data, scale.unsqueeze(1), name, 32)[:, 0].numpy()
        assert differences(got, table) == 0, name


def test_all_of_the_record_is_checked():
    kinds = Counter(e["expect"] for e in ENTRIES)
    assert kinds == {"exact": 2055, "known_divergence": 374, "allclose": 24}
    assert sum("codes" in e and e["expect"] == "exact" for e in ENTRIES) == 118
