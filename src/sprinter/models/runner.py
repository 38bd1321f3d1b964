"""The import path of the runner interface. It re-exports names and holds no code.

``Runner`` and ``ModelOutput`` come from ``interface``; ``make_runner``, ``runner_kind`` and ``capture_kind`` from
``choose``. Code outside this package imports them from here. The runners themselves, which ``make_runner`` chooses
between, are in the folders ``runners/`` (transformers models), ``capture/`` (captured forward passes) and ``gguf/``
(llama.cpp).
"""

from sprinter.models.choose import capture_kind, make_runner, runner_kind
from sprinter.models.interface import ModelOutput, Runner

__all__ = ["ModelOutput", "Runner", "capture_kind", "make_runner", "runner_kind"]
