"""Measurements on real models.

``arms.py`` names the models, ``drafts.py`` compares drafters, ``rows.py`` decodes many texts at once. Speed, drift,
accuracy and equal texts, one text at a time, are runs of ``sprinter bench`` (``benchmarks/configs``).
"""
