"""The server: OpenAI's interface over HTTP, built on ``AsyncEngine``; needs the extra ``serve``.

| modules | contents |
| --- | --- |
| ``settings`` | what a server is started with: addresses, limits, keys |
| ``schema``, ``asked`` | the fields of a request; a request as prompts and options of generation |
| ``service`` | the loaded pair, its engine, and what both are asked for |
| ``choices``, ``answers``, ``events`` | texts of a request; the answer as one object; the answer as events |
| ``speculation``, ``logprobs`` | what speculation did, in vLLM's, llama.cpp's and our form; log-probabilities |
| ``refusals``, ``prometheus`` | errors in OpenAI's shape; metrics |
| ``guard``, ``keys``, ``connections`` | what a request must pass: hosts, keys, rates, sizes, time |
| ``app``, ``logs``, ``run`` | routes; structured logs; the process |
"""
