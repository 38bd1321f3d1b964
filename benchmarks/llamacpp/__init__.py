"""llama.cpp as a runner: speed against llama-cpp-python's own loop, and tokenizers of GGUF files against its own.

``tables.py`` makes the table of ``speed.py``.
"""
