"""Captured forward passes and batches: passes against the bandwidth, decoding against other engines, many rows.

``prefix.py`` measures the prefix cache.
"""
