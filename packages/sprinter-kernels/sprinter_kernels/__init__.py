"""Kernels of Sprinter: whole forward passes of language models on a CPU, and quantised weights.

``supports(model)`` says why a model cannot be run, ``pack(model)`` gives what runs it, whose ``forward`` is a pass.
``quantise(model, dtype, sources)`` rounds a model's weights before, or takes them as blocks of a GGUF file, of the
kinds ``FORMATS``.
"""

from sprinter_kernels.layers import Source
from sprinter_kernels.layout import FORMATS
from sprinter_kernels.model import Packed, Slots, Writers, pack, supports
from sprinter_kernels.quantise import quantise, replaceable

__all__ = ["FORMATS", "Packed", "Slots", "Source", "Writers", "pack", "quantise", "replaceable", "supports"]
