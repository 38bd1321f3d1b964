"""The door to the runners: the interface, the choice, and the maker.

``Runner`` and ``Step`` are what drivers are written against; ``make_runner`` chooses the kind.
"""

from sprinter.models.choose import capture_kind, make_runner, runner_kind
from sprinter.models.interface import Runner, Step

__all__ = ["Runner", "Step", "capture_kind", "make_runner", "runner_kind"]
