"""``sprinter bench``: its table on three suites, and how far its verdicts can be trusted.

Both scripts use the bench's own harness.
"""
