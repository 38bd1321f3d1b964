"""Arms: methods of this package on its engine, transformers, vLLM, llama.cpp, and arms of other packages.

A spec is that of a method (``sprinter(tau=0.6)``) or ``engine:way(param=value, ...)``; ``SPEC as NAME`` renames it.
The timed part is the same for all arms: from passing the token ids to receiving the last new one, without
detokenisation. Settings, seeds and counts are handled before and after.
"""

from sprinter.bench.arms.parse import ARMS, arm_names, parse_arm, parse_arms

__all__ = ["ARMS", "arm_names", "parse_arm", "parse_arms"]
