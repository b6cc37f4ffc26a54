import re
from enum import Enum

import numpy as np
import pytest
import torch

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, MXSpec
from pt2mx.algorithms import GPTQ, Rotation, ScaleSearch
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.recipe import read_yaml
from tests.flow import calibrated, exported
from tests.models import TwoLayers

FP8 = MXQuantizationConfig(weight="mxfp8", activation="mxfp8")
INT8 = MXQuantizationConfig(weight="int8", activation="int8")
FP4 = MXSpec("fp4_e2m1", scale_mode="even")


def everywhere(weight, activation):
    return "global", None, MXQuantizationConfig(weight=weight, activation=activation)


def _ends(weight, heads="lm_head|embed_out|output", activation=None):
    return (
        ("module_name_regex", rf"(.*\.)?({heads})", MXQuantizationConfig(weight=weight, activation=activation)),
        ("operator_type", "aten.embedding", MXQuantizationConfig(weight=weight)),
    )


SHIPPED = {
    "mxfp8": [everywhere("fp8_e4m3", "fp8_e4m3")],
    "mxfp6": [everywhere("fp6_e2m3", "fp6_e2m3")],
    "mxfp4": [everywhere(FP4, FP4)],
    "mxint8": [everywhere("int8", "int8")],
    "mxfp4_weight_only": [everywhere(FP4, None)],
    "mxfp4_weights_mxfp8_activations": [everywhere(FP4, "fp8_e4m3")],
    "nvfp4": [everywhere("nvfp4(mse)", "nvfp4")],
    "nvfp4_weight_only": [everywhere("nvfp4(mse)", None)],
    "mxfp6_weights_mxfp8_activations": [everywhere("fp6_e2m3", "fp8_e4m3")],
    "mxfp4_decoder": [everywhere(FP4, None), *_ends("int8")],
    "decoder_cpu": [
        everywhere(FP4, None),
        ("module_name_regex", r"(.*\.)?(lm_head|embed_out|output)", INT8),
        ("operator_type", "aten.embedding", MXQuantizationConfig(weight="int8")),
        ("operator_type", "aten.linear", MXQuantizationConfig(weight=FP4, activation="int8")),
    ],
    "encoder_smallest": [everywhere(FP4, "int8")],
    "encoder_balanced": [everywhere("fp6_e2m3", "int8")],
    "encoder_best": [everywhere("int8", "int8")],
    "cnn_smallest": [everywhere(FP4, "int8"), ("first", 1, INT8), ("small_weights", 32768, INT8)],
    "cnn_balanced": [everywhere("fp6_e2m3", "int8"), ("first", 1, INT8), ("small_weights", 32768, INT8)],
    "cnn_best": [everywhere("int8", "int8")],
    "decoder_smallest": [everywhere(FP4, None), *_ends("fp6_e2m3")],
    "decoder_balanced": [everywhere("fp6_e2m3", None), *_ends("int8")],
    "decoder_best": [everywhere("int8", None)],
    "asr_smallest": [everywhere(FP4, "int8"), *_ends("fp6_e2m3", "proj_out|lm_head", "int8")],
    "asr_balanced": [everywhere("fp6_e2m3", "int8"), *_ends("int8", "proj_out|lm_head", "int8")],
    "asr_best": [everywhere("int8", "int8")],
    "mxfp4_first_last_mxfp8": [everywhere(FP4, FP4), ("first", 1, FP8), ("last", 1, FP8)],
}


def test_the_shipped_recipes():
    assert {name: recipe.read(name).settings for name in recipe.names()} == SHIPPED


def test_only_recipes_round_scales_of_fp4_by_even():
    """The format itself keeps the rule of the specification (OCP MX v1.0, section 6.3)."""
    assert MXSpec("mxfp4").scale_mode == "floor"
    assert MXQuantizationConfig(weight="mxfp4").weight == MXSpec("mxfp4")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_written_again_says_the_same(name, tmp_path):
    quantizer = MXQuantizer.from_recipe(name)
    quantizer.to_recipe(tmp_path / "r.yaml")
    assert MXQuantizer.from_recipe(tmp_path / "r.yaml").to_dict() == quantizer.to_dict()


@pytest.mark.compiled_cases("*_smallest", "*_balanced", "*_best")
@pytest.mark.filterwarnings("ignore:the setting .* matches no operator of the model")  # such as a head
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_converts_to_the_bit(name):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 32)
    graph = exported(TwoLayers().eval(), x)
    prepared = calibrated(graph, MXQuantizer.from_recipe(name).set_kv_cache(None), x)  # the model has none
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    with torch.no_grad():
        assert torch.equal(prepared(x), converted(x)) and not torch.equal(converted(x), graph(x))


def test_every_kind_of_setting(tmp_path):
    path = tmp_path / "mixed.yaml"
    path.write_text("""
description: all of it
global: {weight: mxfp4, activation: {element: fp8_e4m3, block_size: 16, scale_mode: rceil}}
module_name: {encoder.layer.0: {weight: "MXFP8[E4M3]{64}"}}
module_name_regex: {".*lm_head": null}
module_type: {Linear: {weight: mxint8, output: null, ste: clipped, gradient: {element: mxfp8, rounding: stochastic}}}
first: {2: null}
last: {1: {weight: mxint8}, 3: {weight: mxfp6}}
operator_type: {aten.bmm: {activation: mxfp6, operands: {other: {element: mxint8, block_size: 16}, input: null}}}
""")
    assert recipe.read(path).settings == [
        ("global", None, MXQuantizationConfig(weight="mxfp4", activation=MXSpec("fp8_e4m3", 16, scale_mode="rceil"))),
        ("first", 2, None),
        ("last", 1, MXQuantizationConfig(weight="mxint8")),
        ("last", 3, MXQuantizationConfig(weight="mxfp6")),
        ("module_name", "encoder.layer.0", MXQuantizationConfig(weight=MXSpec("fp8_e4m3", 64))),
        ("module_name_regex", ".*lm_head", None),
        (
            "module_type",
            "Linear",
            MXQuantizationConfig(weight="mxint8", ste="clipped", gradient="mxfp8(stochastic)"),
        ),
        (
            "operator_type",
            "aten.bmm",
            MXQuantizationConfig(activation="mxfp6", operands={"input": None, "other": "mxint8{16}"}),
        ),
    ]


@pytest.mark.parametrize("name", ["fp6_e3m2", "mxint8{64}", "mxfp4_e2m1", "BFP[4|8]{16}(SN)", "nvfp4{32}", "e4m3"])
def test_a_format_is_a_recipe_for_weights_and_activations(name):
    expected = MXQuantizationConfig(weight=name, activation=name)
    assert recipe.read(name) == recipe.Recipe([("global", None, expected)], None, None)
    assert MXQuantizer.from_recipe(name).to_dict()[""] == expected.to_dict()


def test_shipped_recipes_come_before_formats_and_files_before_both(tmp_path, monkeypatch):
    """The recipe `mxfp4` rounds scales by `even`, in upper case too; the format by `floor`."""
    monkeypatch.chdir(tmp_path)
    assert recipe.read("MXFP4") == recipe.read("mxfp4") != recipe.read("mxfp4_e2m1")
    (tmp_path / "fp6_e3m2").write_text("global: {weight: mxint8}")
    assert recipe.read("fp6_e3m2").settings == [("global", None, MXQuantizationConfig(weight="mxint8"))]


def test_the_section_of_algorithms(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("global: {weight: mxfp4}\nalgorithms: {gptq: {damping: 0.1}, rotation: }\n")
    quantizer = MXQuantizer.from_recipe(path)
    assert quantizer.algorithms == (Rotation(), GPTQ(damping=0.1))
    quantizer.to_recipe(path)
    assert MXQuantizer.from_recipe(path).algorithms == quantizer.algorithms
    assert MXQuantizer.from_dict(quantizer.to_dict()).algorithms == quantizer.algorithms
    path.write_text("global: {weight: mxfp4}\nalgorithms: {rotation: {online: false}, scale_search: {}, gptq: {}}\n")
    folded = MXQuantizer.from_recipe(path)
    assert folded.algorithms == (Rotation(online=False), ScaleSearch(), GPTQ())
    folded.to_recipe(path)
    assert MXQuantizer.from_recipe(path).algorithms == folded.algorithms
    assert quantizer.set_algorithms("best").to_recipe().endswith("algorithms: best\n")
    path.write_text("global: {weight: mxfp4}\nalgorithms: imatrix\n")
    assert MXQuantizer.from_recipe(path).algorithms == (ScaleSearch(by_inputs=True),)
    assert "algorithms" not in quantizer.set_algorithms(None).to_recipe()
    assert MXQuantizer.from_recipe("mxfp8").algorithms is None
    path.write_text("global: {weight: mxfp4}\nalgorithms: {gptk: }\n")
    with pytest.raises(MXError, match=r"r\.yaml: unknown algorithm 'gptk': did you mean 'gptq'"):
        MXQuantizer.from_recipe(path)


def test_quantizer_and_recipe_round_trip(tmp_path):
    quantizer = (
        MXQuantizer()
        .set_global(MXQuantizationConfig(weight="mxfp4{16}(rceil)", activation="mxfp8"))
        .set_module_name("head", None)
        .set_module_name_regex(r"layer\.\d+", MXQuantizationConfig(weight="mxint8", bias="mxint8"))
        .set_module_type("Linear", MXQuantizationConfig(output="mxfp6_e3m2"))
        .set_operator_type("aten.bmm", None)
        .set_operator_type("aten.add", MXQuantizationConfig(activation="mxfp8", ste="clipped"))
        .set_first(None)
        .set_first(
            MXQuantizationConfig(weight="mxfp8", operands={"query": None, "value": "mxint8{16}(rceil)"}), count=3
        )
        .set_last(None, count=2)
    )
    text = quantizer.to_recipe(tmp_path / "r.yaml")
    again = MXQuantizer.from_recipe(tmp_path / "r.yaml")
    assert again.to_recipe() == text
    assert again._settings == quantizer._settings and again._global == quantizer._global


def test_subclasses_of_text_and_numbers_are_written_as_what_they_are():
    class Part(str, Enum):
        FIRST = "first"

    quantizer = MXQuantizer().set_module_name(np.str_("head"), FP8).set_module_name(Part.FIRST, None)
    text = quantizer.set_algorithms((GPTQ(damping=np.float64(0.5)),)).to_recipe()
    assert [line for line in text.splitlines() if "  first:" in line or "  head:" in line] == [
        "  head:",
        "  first: null",
    ]
    assert "damping: 0.5" in text and "head" in repr(quantizer)


def test_a_quantizer_prints_its_settings():
    def small(node):
        return True

    assert repr(MXQuantizer()) == "MXQuantizer()"
    quantizer = MXQuantizer.from_recipe("decoder_balanced").set_filter_function(small).set_kv_cache("mxint8")
    assert str(quantizer.set_algorithms("fast").set_last(None)) == (
        """\
MXQuantizer(
  global:
    weight: mxfp6_e2m3{32}
  last:
    1: null
  module_name_regex:
    (.*\\.)?(lm_head|embed_out|output):
      weight: mxint8{32}
  operator_type:
    aten.embedding:
      weight: mxint8{32}
  algorithms: fast
  kv_cache: mxint8{32}
  filter_function: test_a_quantizer_prints_its_settings.<locals>.small
)"""
    )


def test_a_filter_cannot_be_written():
    with pytest.raises(MXError, match="filter function cannot be written"):
        MXQuantizer().set_filter_function(lambda node: True).to_recipe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("globl: {weight: mxfp4}", "unknown key 'globl' in the recipe: did you mean 'global'"),
        ("global: {wieght: mxfp4}", "unknown key 'wieght' in global: did you mean 'weight'"),
        ("global: {weight: mxpf4}", "global: weight: .*did you mean 'mxfp4'"),
        ("global: {weight: {element: mxfp4, blok_size: 3}}", "unknown key 'blok_size' .*did you mean 'block_size'"),
        ("global: {weight: {block_size: 3}}", "the element format is missing"),
        ("global: {weight: {element: mxfp4, block_size: 0}}", "block_size=0"),
        ("global: {weight: {element: mxfp4, scale_mode: flor}}", "did you mean 'floor'"),
        ("global: {weight: 4}", "a spec is a format's name"),
        ("global: mxfp4", "global must be a mapping"),
        ("module_name: mxfp4", "module_name must map names to configs"),
        ("module_type: {Linear: mxfp4}", "module_type 'Linear' must be a mapping"),
        ("global: {weight: mxfp4, operands: {valeu: mxfp8}}", "unknown key 'valeu' in global: operands: .*'value'"),
        ("global: {weight: mxfp4, operands: {value: mxpf8}}", "global: operand 'value': .*did you mean 'mxfp8'"),
        ("global: {weight: mxfp4, operands: mxfp8}", "global: operands must be a mapping"),
        ("global: {weight: mxfp4, ste: clip}", "global: unknown ste 'clip': did you mean 'clipped'"),
        (
            "global: {weight: mxfp4, gradient: mxfp8, gradient_hadamard: 3}",
            "global: gradient_hadamard=3 must be a power",
        ),
        ("first: {weight: mxfp4}", "first 'weight' must be a mapping"),
        ("first: {one: null}", "first: count='one' must be an integer of at least 1"),
        ("last: {0: null}", "last: count=0 must be an integer of at least 1"),
        ("first: null", "first must map counts to configs"),
        ("- 1", "the recipe must be a mapping"),
        ("", "the recipe must be a mapping"),
        ("description: nothing", "it quantizes nothing"),
        ("{", r'recipe .*yaml: while parsing .* in ".*bad\.yaml", line 1, column 2'),
        ("operator_type: {aten.bm: null}", "did you mean 'aten.bmm'"),
        ("module_name: {1: null, '1': null}", "module_name '1' says again what an earlier key says: keep one of them"),
        ("operator_type: {aten.bmm: null, aten.bmm.default: null}", "operator_type 'aten.bmm.default' says again"),
        ("module_name_object_type_order: [[a, aten.bmm, 0, null], [a, bmm, 0, null]]", "'a', 'bmm', 0. says again"),
        ("module_name_object_type_order: {a: null}", r"must be a list of \[module, type, index, config\]"),
        ("module_name_object_type_order: [[a, Linear, null]]", r"must be a list of \[module, type, index, config\]"),
        ("module_name_object_type_order: [[a, Linear, x, null]]", "index='x' must be an integer of at least 0"),
        ("module_name_object_type_order: [[a, Linear, 0, mxfp4]]", r"order \['a', 'Linear', 0\] must be a mapping"),
    ],
)
def test_bad_recipes_name_the_nearest(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(MXError, match=message):
        MXQuantizer.from_recipe(path)


@pytest.mark.parametrize("name", ["mxfp44", "/no/such/file.yaml", 7])
def test_no_such_recipe(name):
    with pytest.raises(MXError, match=r"^no recipe .*no file.*mxfp4"):
        MXQuantizer.from_recipe(name)


def test_a_binary_file_is_no_recipe(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(MXError, match=r"recipe .*r\.yaml"):
        MXQuantizer.from_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", None),
        ("a: 1\nb: [x, null, true]", {"a": 1, "b": ["x", None, True]}),
        (
            "a: &x {k: 1}\nb: *x\nc: {<<: *x, l: 2}\nd: {<<: *x, k: 3}",
            {"a": {"k": 1}, "b": {"k": 1}, "c": {"k": 1, "l": 2}, "d": {"k": 3}},
        ),
        ("\ufeffa: µ", {"a": "µ"}),
        ("{a: {k: 1}, b: {k: 1}}", {"a": {"k": 1}, "b": {"k": 1}}),
    ],
)
def test_text_that_is_yaml(text, data):
    assert read_yaml(text.encode(), "a.yaml") == data


NESTED = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join([f'*{chr(ord(n) - 1)}'] * 9)}]\n" for n in "bcdefghi"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' is there twice, in lines 1 and 3: keep one of them"),
        ("x:\n  - k: {}\n    l: 1\n    k: 2", "the key 'k' is there twice, in lines 2 and 4"),
        ("{1: a, 0x1: b}", "the key 1 is there twice, in lines 1 and 1"),
        ("{null: a, ~: b}", "the key None is there twice"),
        ("a: &a [*a]", "the anchor in line 1 holds itself"),
        ("&a {k: {l: *a}}", "the anchor in line 1 holds itself"),
        (NESTED, "it has more than 10,000 values"),
        ("[" * 1500, "it is nested too deeply"),
        ("{a: " * 1500, "it is nested too deeply"),
        ("a: 2020-13-45", "month must be in 1..12"),
        ("a: !!int x", "invalid literal"),
        ("a: !!int ''", "string index out of range"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("{[1]: 2}", "found unhashable key"),
        ("a: *b", "found undefined alias"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("{", "expected"),
        ("a: \x04", "unacceptable character"),
        (b"\xc7a: 1", "unacceptable character"),
        (b"\xff\xfe\x00", "'utf-16-le' codec|unacceptable|truncated"),
    ],
)
def test_errors_name_the_mistake(text, message):
    with pytest.raises(MXError, match=message) as error:
        read_yaml(text.encode() if isinstance(text, str) else text, "dir/a.yaml")
    said = str(error.value)
    assert "\n" not in said and not re.search(r"<(byte|unicode|file|std)", said)
    assert 'in "' not in said or 'in "dir/a.yaml", ' in said
