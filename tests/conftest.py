"""Settings for all tests."""

from hypothesis import settings

# The same examples every time: a red test can be run again, and no database is written.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("fixed")
