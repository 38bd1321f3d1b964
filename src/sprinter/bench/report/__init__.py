"""Render a results file as one HTML page without external requests: light and dark, any width, scripts optional.

Without matplotlib the page has its tables, and lines that say how to get the pictures.
"""

from __future__ import annotations

from sprinter.bench.report.page import write_report

__all__ = ["write_report"]
