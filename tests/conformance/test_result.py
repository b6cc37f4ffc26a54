from mx_conformance import Conformance, Row
from mx_conformance import result as tables

RESULTS = [
    Conformance(
        "one 1.0",
        "mxfp4_e2m1",
        mode,
        "even",
        (
            Row("ties", "5.3.3", 10, choices=("rounding up",)),
            Row("zero blocks", "6.3", 3, choices=("-0 becomes 0",)),
            Row("saturation", "6.3", 8, deviations=int(mode == "ceil"), example="[7.0]: 7.0 became 8.0 | 6.0"),
        ),
    )
    for mode in ("floor", "ceil")
]


def test_a_line_for_each_implementation():
    head, line = tables.summary(RESULTS)
    cells = dict(zip(head, line, strict=True))
    assert cells.pop("mxfp4_e2m1") == "1/42" and cells.pop("mxint8") == "-" and len(cells) == 7
    assert (cells["implementation"], cells["scale rules"], cells["rounding"]) == ("one 1.0", "floor, ceil", "even")
    assert tables.choices(RESULTS)[1:] == [("one 1.0", "mxfp4_e2m1", "-0 becomes 0")]
    assert tables.examples(RESULTS)[1:] == [
        ("one 1.0", "saturation", "6.3", "deviation", "mxfp4_e2m1", "[7.0]: 7.0 became 8.0 | 6.0")
    ]


def test_text_and_markdown():
    first, second = RESULTS
    assert len(tables.text([first]).split("\n\n")) == 2 and len(tables.text([second]).split("\n\n")) == 3
    assert "| one 1.0 | saturation | 6.3 | deviation | mxfp4_e2m1 | [7.0]: 7.0 became 8.0 \\| 6.0 |" in tables.markdown(
        [second]
    )


def test_a_result_as_text_and_as_data():
    result = RESULTS[1]
    assert (result.conforms, result.cases, result.deviations) == (False, 21, 1)
    assert result.choices == ("rounding up", "-0 becomes 0")
    assert [row.verdict for row in result.rows] == ["allowed choice", "allowed choice", "deviation"]
    lines = str(result).splitlines()
    assert lines[0] == "one 1.0, mxfp4_e2m1, scale rule ceil, rounding even: 1 of 21 cases deviate"
    assert lines[2].split() == ["ties", "5.3.3", "10", "-", "-", "allowed", "choice:", "rounding", "up"]
    data = result.to_dict()
    assert data["deviations"] == 1 and data["rows"][2]["example"].startswith("[7.0]")
    assert str(RESULTS[0]).splitlines()[0].endswith("no deviation")
