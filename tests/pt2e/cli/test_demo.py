import pytest

from pt2mx.pt2e.cli.demo import main


@pytest.mark.slow  # tests/test_package.py runs it in an installed wheel
def test_demo_prints_a_report_and_a_table(capsys):
    main(("mxfp8", "mxfp4_weight_only"), compile=False)
    out = capsys.readouterr().out
    assert "45 of 45 operators quantized" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("mxfp")}
    assert "DIFFERS" not in out
    for name, largest, least in (("mxfp8", 0.30, 0.99), ("mxfp4_weight_only", 0.18, 0.95)):
        _, _, ratio, _, cosine, _, retrieval, *_ = rows[name]
        assert float(ratio.rstrip("x")) <= largest and float(cosine) >= least and float(retrieval.rstrip("%")) >= 90
