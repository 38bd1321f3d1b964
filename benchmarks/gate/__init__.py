"""The gate: which signal to learn, how well it transfers to other text, how fast labels are made.

``study.py`` leaves labels and gates in a folder that ``oracle.py`` reads.
"""
