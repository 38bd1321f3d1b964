"""Settings for all tests."""

import os

# Small models gain nothing from threads, and lose much where the cores are busy; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# The same examples every time: a red test can be run again, and no database is written.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("fixed")
