"""The server: many streams for minutes, latency beside other servers, evaluations, one seed in a crowd, any request.

``clients.py`` measures streams, ``servers.py`` starts the servers as processes, ``schema_hooks.py`` is of schemathesis.
"""
