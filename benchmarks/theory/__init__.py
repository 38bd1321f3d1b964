"""What the theory predicts against what is measured.

``rows.py`` decodes many prompts at once, for counts.
"""
