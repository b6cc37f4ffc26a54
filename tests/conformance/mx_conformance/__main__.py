"""`python -m mx_conformance`: score the installed implementations, as `pt2mx conformance` does."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mx_conformance.adapters import report, score, select
from mx_conformance.errors import MXError
from mx_conformance.result import Conformance, markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser("python -m mx_conformance", description=__doc__)
    parser.add_argument("--implementation", nargs="+", default=[], help="the ones to check (default: all installed)")
    parser.add_argument("--format", nargs="+", default=[], help="the formats, such as mxfp4 (default: all six)")
    parser.add_argument("--output", type=Path, help="write the tables (.md) or all rows (.json)")
    options = parser.parse_args(arguments)
    try:
        if options.output is not None and options.output.suffix not in (".md", ".json"):
            raise MXError(f"--output {options.output}: use a name that ends in .md or .json")
        installed, absent = select(options.implementation, options.format)
        results: list[Conformance] = []
        for name in installed:
            print(f"check {name}", file=sys.stderr)
            results += score(name, options.format)
        text, data = report(results, absent)
        if options.output is not None:
            is_json = options.output.suffix == ".json"
            options.output.write_text(json.dumps(data, indent=1) if is_json else markdown(results), encoding="utf-8")
    except (MXError, OSError) as error:
        print(f"mx_conformance: error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
