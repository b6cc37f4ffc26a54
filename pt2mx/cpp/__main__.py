"""`python -m pt2mx.cpp` prints the path of the library, or writes it to a folder."""

from __future__ import annotations

import argparse
import sys

from pt2mx.cpp.library import build, library_path
from pt2mx.errors import MXError


def main(arguments: list[str] | None = None) -> int:
    """Run the command: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m pt2mx.cpp", description="Build pt2mx's operators for C++.")
    parser.add_argument("--output", metavar="FOLDER", help="where the library goes; by default to a cache")
    parser.add_argument("--capability", help="of the processors: DEFAULT, AVX2 or AVX512; by default this one's")
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
