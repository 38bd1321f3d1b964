"""Benchmarks of the engine."""

from __future__ import annotations
