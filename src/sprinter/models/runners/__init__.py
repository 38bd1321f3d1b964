"""Runners over transformers models. To get one, call ``sprinter.models.choose.make_runner``.

| module | contents |
| --- | --- |
| ``row`` | the usual runner: preallocated rows, any batch; its keys and values, and attention masks |
| ``crop`` | the fallback: one row over transformers' own growing cache |
| ``forward`` | what all runners share: lengths, trees, checks, prefill chunks, the call of the model |
| ``rope``, ``tree`` | where a rotary embedding changes; trees of draft tokens |
"""
