"""Captured forward passes: CUDA graphs on NVIDIA.

| module | contents |
| --- | --- |
| ``runner`` | the row runner with captured forward passes |
| ``trace`` | the forward pass as a plain function of tensors, and units around it |
| ``graphs`` | CUDA graphs |
"""
