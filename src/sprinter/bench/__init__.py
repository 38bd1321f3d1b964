"""The bench: suites of prompts, arms that answer them (our methods, other engines), quality, results, report."""
