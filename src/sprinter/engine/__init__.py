"""Drivers that answer the decoding loop with real models, and the public ``generate`` and ``stream``."""
