"""Captured forward passes: compiled ahead of time on a CPU, CUDA graphs on NVIDIA.

| module | contents |
| --- | --- |
| ``runner`` | the row runner with captured forward passes |
| ``trace`` | the forward pass as a plain function of tensors |
| ``compiled``, ``attention``, ``kernels`` | compiled code for a CPU, kept on disk, and its own kernels |
| ``units``, ``together`` | units of one model compiled for a CPU; several compiled at the same time |
| ``graphs`` | CUDA graphs |
| ``marks`` | detects when the model has changed since it was captured |
"""
