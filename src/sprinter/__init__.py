"""Sprinter: speculative decoding with a dial.

A small draft model writes, a large target model is asked as rarely as the user allows, and the user always sees the
price: speed on one axis, drift from the target's distribution on the other.
"""
from __future__ import annotations
__version__ = "0.1.0"
