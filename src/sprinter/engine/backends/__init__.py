"""Backends: how models run over rows, by four verbs, and what follows a pass.

| module | contents |
| --- | --- |
| ``base`` | what backends are asked and answer; laws, draws, signals and scores after a pass |
| ``eager`` | any runner, one operation at a time |
| ``cuda_graph`` | CUDA graphs over the same rows |
"""
