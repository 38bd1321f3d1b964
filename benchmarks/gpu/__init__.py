"""One command for an NVIDIA GPU: ``run.py`` trains a pair, runs the arms on it and measures against the roofline.

The other files are its stages and what they share.
"""
