"""The command `pt2mx formats`: the table of element formats."""

from __future__ import annotations

import argparse

from pt2mx.analysis.compare import print_mx_format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_formats)


def _formats(options: argparse.Namespace) -> None:
    print_mx_format_table()
