"""The server: OpenAI's interface over HTTP, built on ``AsyncEngine``; needs the extra ``serve``.

| modules | contents |
| --- | --- |
| ``settings`` | what a server is started with: addresses, limits, keys |
| ``schema``, ``request_parsing`` | the fields of a request; a request as prompts and options of generation |
| ``service``, ``registry`` | a pair, its engine, and what both are asked for; several of them by name |
| ``owners``, ``turns`` | what all models share: keys, rates, counts; work in which owners take turns |
| ``completion_streams``, ``responses``, ``events`` | texts of a request; the answer whole, or as events |
| ``speculation``, ``logprobs`` | what speculation did, in vLLM's, llama.cpp's and our form; log-probabilities |
| ``api_errors``, ``prometheus``, ``page`` | errors in OpenAI's shape; metrics; the page at ``/`` |
| ``guard``, ``keys``, ``connections`` | what a request must pass: hosts, keys, rates, sizes, time |
| ``app``, ``logs``, ``run`` | routes; structured logs; the process |
"""
