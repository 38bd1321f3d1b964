"""Benchmarks, a folder a topic: each script prints its numbers and writes them into ``benchmarks/results``.

Run one from the repository's root, ``python benchmarks/FOLDER/SCRIPT.py --data DIR``; ``--smoke`` tries it in seconds.
"""
