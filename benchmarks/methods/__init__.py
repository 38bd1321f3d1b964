"""What the bench cannot measure of methods: enumerations, the tuner's choice, the default against plain decoding.

``crosscheck.py`` compares counts and texts with transformers' assisted decoding.
"""
