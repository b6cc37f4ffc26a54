"""Check any implementation of the MX formats against OCP MX v1.0, in exact arithmetic."""

from pt2mx.conformance.check import check
from pt2mx.conformance.result import Conformance, Row

__all__ = ["Conformance", "Row", "check"]
