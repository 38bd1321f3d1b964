"""Suites: prompts by name or from files, and checks of their answers.

``load_suite`` returns the samples, ``turn_ids`` the token ids of a prompt for a pair. Other packages add suites through
entry points of the group ``sprinter.bench_suites``: functions without arguments that return an ``Entry``.
"""

from sprinter.bench.suites.entry import Entry, Hub, Making, SuiteSource
from sprinter.bench.suites.load import check_suite, load_suite, suite_names
from sprinter.bench.suites.makers import group_of_spec_bench
from sprinter.bench.suites.rule import TextRule
from sprinter.bench.suites.turns import turn_ids, turn_prompt

__all__ = [
    "Entry", "Hub", "Making", "SuiteSource", "TextRule", "check_suite", "group_of_spec_bench", "load_suite",
    "suite_names", "turn_ids", "turn_prompt",
]  # fmt: skip
