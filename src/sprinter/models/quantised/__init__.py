"""Weights of 4 to 8 bits on CPUs, ``dtype="int8"``, ``"int4"`` and ``"gguf"``; on NVIDIA GPUs fused layers and int8.

The kernels read weights once for all tokens of a short forward pass, so that a pass over eight tokens takes about as
long as one over a single token.
"""
