"""Tables of published papers, re-run on the built-in pair.

``report.py`` turns measured numbers into verdicts on a paper's claims; ``arms.py`` has prompts, groups and judge.
"""
