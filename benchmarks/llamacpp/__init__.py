"""llama.cpp as a runner: speed against llama-cpp-python's own loop.

``tables.py`` makes table, figure and documentation page from the results.
"""
