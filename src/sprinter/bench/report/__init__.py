"""Render a results file as one HTML page without external requests: light and dark, any width, scripts optional."""

from __future__ import annotations

from sprinter.bench.report.digest import headline
from sprinter.bench.report.page import write_report

__all__ = ["headline", "write_report"]
