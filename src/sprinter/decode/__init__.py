"""The rules and the loop, no models: trust, stop, accept, methods, the coroutine, the meter, the conformance checks."""
