"""The door to the runners: the interface, the choice, and the maker.

``Runner`` and ``ModelOutput`` are what drivers are written against; ``make_runner`` chooses the kind.
"""

from sprinter.models.choose import capture_kind, make_runner, runner_kind
from sprinter.models.interface import ModelOutput, Runner

__all__ = ["ModelOutput", "Runner", "capture_kind", "make_runner", "runner_kind"]
