"""Models: loading a pair, running it, and what it costs in memory and FLOPs.

| module | contents |
| --- | --- |
| ``pair`` | loads a target, a draft and their tokenizer; the built-in pair |
| ``source`` | finds a model (directory, hub, GGUF file, memory) and checks it before its weights are loaded |
| ``vocabulary`` | checks that two models share a vocabulary |
| ``common_tokens``, ``translated`` | drafts whose vocabulary is not the target's |
| ``interface`` | ``Runner`` and ``ModelOutput``: what the engine knows of a running model |
| ``choose`` | which runner serves a model, and why; ``make_runner`` |
| ``lora`` | a model with a LoRA adapter, over the same weights |
| ``checks`` | checks logits for NaN and infinities |
| ``memory`` | sizes of caches, free memory, the largest batch that fits |
| ``flops`` | forward FLOPs of a token |
| ``convert`` | converts models to GGUF, by command or for the llama.cpp runner |
| ``cachedir`` | the cache directory and who may write to it |
| ``progress`` | progress bars of transformers and the hub, shown on terminals only |

| folder | contents |
| --- | --- |
| ``runners/`` | eager runners over transformers models: ``row``, ``crop`` |
| ``capture/`` | the row runner with captured forward passes: CUDA graphs on NVIDIA |
| ``gguf/`` | GGUF files: the llama.cpp runner, reading and writing |
| ``builtin/`` | weights of the built-in pair, its gate and its heads |
"""
