"""The page of a report at three sizes of model: its bytes, and its load time.

    python -m tests.benchmarks.report_page [--keep FOLDER]

Models of transformers with random weights and small widths. Each page has four candidates for every tensor, the output
error of each module in two formats, and the graphs before and after. Time is from the request of the file to the end of
its script, in headless Chromium: the median of five loads, also with a processor that is four times as slow.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch import nn

import pt2mx
from pt2mx import MXFormatObserver, MXQuantizationConfig, MXQuantizer
from pt2mx.extras import import_extra
from tests.benchmarks.measure import Row, hardware, print_table, timed
from tests.browser import CHROMIUM, Browser, Page
from tests.flow import calibrated, exported
from tests.models import Logits

_WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
#: name -> transformers' config class and number of layers
SIZES = {
    "Llama, 2 layers": ("LlamaConfig", 2),
    "BERT, 12 layers": ("BertConfig", 12),
    "Llama, 32 layers": ("LlamaConfig", 32),
}
_CANDIDATES = ("mxfp4", "mxfp6", "mxfp8", "mxint8")
_READY = "document.readyState === 'complete' && document.documentElement.dataset.ready"
_LOADS = 5


def model_of(kind: str, layers: int) -> nn.Module:
    """A model that predicts tokens."""
    transformers = import_extra("transformers", "hf")
    config = getattr(transformers, kind)(**_WIDTHS, num_hidden_layers=layers, use_cache=False)
    made = transformers.AutoModelForMaskedLM if kind == "BertConfig" else transformers.AutoModelForCausalLM
    return Logits(made.from_config(config)).eval()


def page_of(name: str, file: Path) -> tuple[int, float]:
    """Write the page of a model: how many operators it has, and the seconds of writing it."""
    torch.manual_seed(0)
    ids = torch.randint(512, (2, 16))
    with torch.no_grad():
        graph = exported(model_of(*SIZES[name]), ids)
    observer = MXFormatObserver.with_args(candidates=_CANDIDATES)
    config = MXQuantizationConfig(weight="mxfp4", activation="mxfp8", observer=observer)
    converted = pt2mx.convert_pt2e(calibrated(graph, MXQuantizer().set_global(config), ids))
    report = pt2mx.quantization_report(converted)
    sensitivity = pt2mx.sensitivity(graph, [ids], ["mxfp4", "mxfp8"], method="gradient")
    more = {"model": name, "recipe": "mxfp4", "sensitivity": sensitivity, "before": graph, "after": converted}
    return len(report.operators), timed(lambda: report.to_html(file, **more))


def milliseconds(browser: Browser, file: Path, slower: int) -> float:
    """Return the milliseconds until a page is loaded."""
    times = []
    for _ in range(_LOADS):
        page = Page(browser, file, slower=slower)
        page.wait(_READY)
        times.append(float(page.run("document.documentElement.dataset.ready")))
        assert not page.problems, page.problems
        page.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="a folder for the pages")
    keep = parser.parse_args().keep
    if CHROMIUM is None:
        raise SystemExit("no Chromium is installed")
    print(hardware())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(Path(folder) / "profile") as browser,
    ):
        rows: list[Row] = []
        for name in SIZES:
            file = (keep or Path(folder)) / f"{name.replace(', ', '_').replace(' ', '_')}.html"
            operators, seconds = page_of(name, file)
            times = [milliseconds(browser, file, slower) for slower in (1, 4)]
            row = {"model": name, "operators": operators, "kB": file.stat().st_size / 1e3, "s to write": seconds}
            rows.append({**row, "ms": times[0], "ms, slower": times[1]})
        print_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
