"""Kernels of Sprinter: whole forward passes of language models on a CPU, and quantised weights.

``supports(model)`` says why a model cannot be run, ``pack(model)`` gives what runs it, whose ``forward`` is a pass.
"""

from sprinter_kernels.model import Packed, Slots, pack, supports

__all__ = ["Packed", "Slots", "pack", "supports"]
