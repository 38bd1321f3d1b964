"""GGUF files and llama.cpp.

| module | contents |
| --- | --- |
| ``load``, ``header`` | a GGUF file as a model; reading its metadata |
| ``runner`` | the llama.cpp runner |
| ``config``, ``dequantise`` | a GGUF file as a transformers model, which PyTorch runs |
| ``tokenizer``, ``pretokenizers`` | reading its tokenizer; pre-tokenizers under llama.cpp's names |
| ``write``, ``vocabulary`` | writing a model and its tokenizer as GGUF |
| ``library`` | imports llama-cpp-python and ``gguf`` when they are first needed |
| ``repack``, ``trial`` | whether llama.cpp may repack weights on this machine, tried in a child process |
"""
