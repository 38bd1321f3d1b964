"""Learned heads on a model's hidden states.

Heads that score draft tokens, gates among them: ``head`` = ``features`` + ``networks`` + ``calibration``; ``artifact``.
Heads that draft: ``drafting`` is what they share, ``medusa``, ``eagle``, ``eagle3`` and ``glide`` the kinds;
``attention`` and ``entries`` what those with attention share. ``files`` has the files of all, ``load`` reads any.
"""
