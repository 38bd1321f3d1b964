"""The methods on the built-in pair: speed, target calls and drift.

``crosscheck.py`` compares counts and texts with transformers' assisted decoding.
"""
