"""A results file as one HTML page: no request to anywhere, light and dark, at any width, with and without scripts."""

from __future__ import annotations

from sprinter.bench.report.digest import headline
from sprinter.bench.report.page import write_report

__all__ = ["headline", "write_report"]
