"""Runners over transformers models. To get one, call ``sprinter.models.choose.make_runner``.

| module | contents |
| --- | --- |
| ``row`` | the usual runner: preallocated rows, any batch |
| ``crop`` | the fallback: one row over transformers' own growing cache |
| ``forward`` | what all runners share: lengths, trees, checks, prefill chunks, the call of the model |
| ``row_cache`` | keys and values of the row runner |
| ``masks``, ``rope``, ``tree`` | attention masks; where a rotary embedding changes; trees of draft tokens |
"""
