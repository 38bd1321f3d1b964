"""``sprinter bench`` itself: how far its verdicts can be trusted.

``noise.py`` runs the same arm twice, and one that was made slower, through the bench's own harness.
"""
