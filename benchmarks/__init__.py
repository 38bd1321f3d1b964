"""Benchmarks, a folder a topic: each script prints its numbers and writes them into ``benchmarks/results``.

What ``sprinter bench`` can do is no script but a file of its options in ``benchmarks/configs``; ``scripts/records.py``
publishes such a run.

Run a script from the repository's root, ``python benchmarks/FOLDER/SCRIPT.py --data DIR``; ``--smoke`` tries it in
seconds.
"""
