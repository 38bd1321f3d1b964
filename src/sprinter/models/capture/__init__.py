"""Captured passes: compiled ahead of time on a CPU, CUDA graphs on NVIDIA."""
