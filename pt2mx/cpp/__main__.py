"""Print the path of the library, or write it to a folder: `python -m pt2mx.cpp`."""

from __future__ import annotations

import argparse
import sys

from pt2mx.cpp.library import build, library_path
from pt2mx.errors import MXError


def main(arguments: list[str] | None = None) -> int:
    """Run the command: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m pt2mx.cpp", description="Build pt2mx's operators for C++.")
    parser.add_argument("--output", metavar="FOLDER", help="write the library to this folder instead of the cache")
    parser.add_argument("--capability", help="of the processors: DEFAULT, AVX2 or AVX512; default: this processor's")
    options = parser.parse_args(arguments)
    if options.capability and not options.output:
        parser.error("--capability takes an --output")
    try:
        print(build(options.output, options.capability) if options.output else library_path())
    except MXError as error:
        print(f"python -m pt2mx.cpp: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
