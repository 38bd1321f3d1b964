"""GGUF files and llama.cpp: reading, writing, converting, running."""
