"""Measurements on real models.

``tables.py`` compares methods on an instruct pair in chat, ``collect.py`` joins its parts to drift against quality,
``arms.py`` lists the arms, ``equality.py`` compares greedy texts.
"""
