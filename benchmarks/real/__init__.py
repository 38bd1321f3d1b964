"""Measurements on real models: the papers' tables, and drift against quality."""
