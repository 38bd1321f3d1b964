"""Arms by name, and those that other packages add."""

from __future__ import annotations

from sprinter.decode.registry import Registry

__all__ = ["ARMS"]

ARMS = Registry("arm", "sprinter.bench_arms")
"""Name ("transformers:assisted") → class or function with keyword parameters, all with defaults, that gives an ``Arm``.

Other packages add theirs through entry points of the group ``sprinter.bench_arms``. Making an arm must be cheap: what
costs time belongs in its ``start``.
"""
