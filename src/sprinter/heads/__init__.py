"""Learned heads on the draft's hidden states: the gate (inference side)."""
