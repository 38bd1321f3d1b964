"""Decoder layers of known families as few kernels on an NVIDIA GPU, for what is captured as CUDA graphs.

``kernels`` has the kernels in Triton's language, ``plan`` how they share the work, ``layers`` puts them in the place of
transformers' layers, ``trial`` compares the two.
"""

from __future__ import annotations

__all__: list[str] = []
