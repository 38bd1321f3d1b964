"""The server: many streams for minutes, latency against other servers, likelihoods for evaluations.

``clients.py`` measures streams, ``servers.py`` starts the servers as processes.
"""
