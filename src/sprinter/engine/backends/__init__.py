"""Backends: how models run over rows, by four verbs, and what follows a pass.

| module | contents |
| --- | --- |
| ``base`` | what backends are asked and answer |
| ``texts`` | the texts in a model's rows: prefill, and what one leaves for others |
| ``eager`` | any runner, one operation at a time; laws, draws, signals and scores after a pass |
| ``single_call`` | draft runs on a CPU in one call of our kernels |
| ``cuda_graph`` | CUDA graphs over the same rows |
| ``graph_units`` | what is captured of draft runs and target passes |
"""
