"""Models: loading a pair, the runners that drive it, what a token costs."""
