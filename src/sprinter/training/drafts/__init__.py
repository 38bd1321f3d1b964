"""Distils a draft model from a target: texts that the target writes, a student, losses, training, its card."""
