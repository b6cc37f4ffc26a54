"""The startup time of a process: `import pt2mx` and the quick commands, over `import torch`.

    python -m tests.benchmarks.startup [--repeats 9] [--json]

Each time is the whole time of a fresh process, with its start and its end. The processes take turns, so that other load
affects all.
"""

import argparse
import subprocess
import sys

from tests.benchmarks.measure import Row, medians_in_turns, report

_STARTS = {
    "import torch": ("-c", "import torch"),
    "import pt2mx": ("-c", "import pt2mx"),
    "pt2mx formats": ("-m", "pt2mx", "formats"),
    "pt2mx --help": ("-m", "pt2mx", "--help"),
    "pt2mx --version": ("-m", "pt2mx", "--version"),
    "pt2mx quantize --help": ("-m", "pt2mx", "quantize", "--help"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    medians = medians_in_turns([lambda arguments=each: _start(arguments) for each in _STARTS.values()], args.repeats)
    rows: list[Row] = [
        {"what": what, "seconds": seconds, "over import torch": seconds / medians[0]}
        for what, seconds in zip(_STARTS, medians, strict=True)
    ]
    report(rows, None, args.json)


def _start(arguments: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    main()
