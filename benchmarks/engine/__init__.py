"""Captured forward passes and batches: passes against the bandwidth, decoding against other engines, many rows.

``prefix.py`` measures the prefix cache, ``revisions.py`` compares two checkouts. ``figure.py`` draws
docs/figures/engine.png from the results of the others.
"""
