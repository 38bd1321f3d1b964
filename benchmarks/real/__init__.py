"""Measurements on real models.

``arms.py`` names the models, ``equality.py`` compares greedy texts, ``rows.py`` decodes many at once. Speed, drift and
accuracy one text at a time are runs of ``sprinter bench`` (``benchmarks/configs``).
"""
