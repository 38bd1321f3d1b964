"""Measurements on real models.

``quality.py`` compares methods on an instruct pair in chat, ``collect.py`` joins them to drift against quality,
``speed.py`` times them beside other engines, ``arms.py`` lists the arms, ``equality.py`` compares greedy texts.
"""
