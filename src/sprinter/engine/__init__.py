"""Drivers that answer the loop with real models, and the public generate and stream."""
