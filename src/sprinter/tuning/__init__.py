"""The tuner: finds the fastest method of a pair on the user's prompts, within a budget on drift or a goal of quality.

==============  ========================================================================
``settings``    what is asked: budgets and their unit, goals of quality, time
``candidates``  the methods that are tried
``probe``       what is known before any method runs: laws along texts, times of passes
``prune``       speed and drift of each candidate by replay; the best go on
``race``        the best run live, in rounds; the slower half leaves after each
``judge``       which finalists meet the goals; entries of the profile
``run``         all of it, in order, resumable; writes the profile
``picture``     speed against drift, as PNG and for the terminal
==============  ========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sprinter.lazy import lazy_names

if TYPE_CHECKING:
    from sprinter.tuning.run import tune as tune
    from sprinter.tuning.settings import Goal as Goal
    from sprinter.tuning.settings import TuneSettings as TuneSettings

__getattr__, __dir__, __all__ = lazy_names(__name__)
