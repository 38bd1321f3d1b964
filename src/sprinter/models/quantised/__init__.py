"""Weights of 4 to 8 bits on CPUs: ``dtype="int8"``, ``"int4"`` and ``"gguf"``.

The kernel reads weights once for all tokens of a short forward pass, so that a pass over eight tokens takes about as
long as one over a single token.
"""
