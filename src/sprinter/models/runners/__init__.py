"""Runners over transformers models: preallocated rows, a growing cache, switched rotary embeddings."""
