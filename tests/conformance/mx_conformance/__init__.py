"""Check any implementation of the MX formats against OCP MX v1.0, in exact arithmetic."""

from mx_conformance.check import check
from mx_conformance.result import Conformance, Row

__all__ = ["Conformance", "Row", "check"]
