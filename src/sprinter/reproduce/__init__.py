"""The papers' protocols on any pair: each paper's tables beside what is measured here, each claim with a verdict.

``papers.PAPERS`` has the protocols and ``papers.reproduce`` runs one in a ``study.Study``.
"""
