"""The benchmark: suites of prompts, arms that answer them (methods of this package, other engines), quality, report.

================  ==================================================================================================
``run``           a whole run (``run_bench``); ``settings`` has its parameters
``suites``        loads prompts by name or from files; ``sample`` has the types
``arms``          implements the ``arm`` interface for this engine, transformers, vLLM and llama.cpp
``harness``       asks every arm every prompt and times the answers; ``journal`` stores them, so that runs resume
``grading``       measures the answers after the timed part; ``quality`` has the measures and judges
``summary``       summarises rows by arm, suite and temperature, with intervals from ``statistics``
``analysis``      compares both models' laws along texts; ``environment`` describes machine, versions and commit
``results``       the format of ``results.json``; ``compare`` compares two of them; ``report`` makes the HTML page
================  ==================================================================================================
"""
