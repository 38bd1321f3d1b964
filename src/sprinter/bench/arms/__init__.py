"""Arms: our methods on our engine, transformers, vLLM, and whatever other packages add.

A spec is a method's (``sprinter(tau=0.6)``) or ``engine:way(param=value, ...)``; ``SPEC as NAME`` names it anew.
What is timed is the same for all arms: from handing over token ids to having the last new one, without turning ids
into text; settings, seeds and counting are done before and after.
"""

from sprinter.bench.arms.parse import arm_names, parse_arm, parse_arms
from sprinter.bench.arms.registry import ARMS

__all__ = ["ARMS", "arm_names", "parse_arm", "parse_arms"]
