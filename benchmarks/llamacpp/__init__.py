"""GGUF files: laws through llama.cpp and through PyTorch, and tokenizers against llama.cpp's own.

Speeds are runs of ``sprinter bench`` (``benchmarks/configs``).
"""
