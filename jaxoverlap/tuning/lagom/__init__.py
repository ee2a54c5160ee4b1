"""Lagom's model of a step and its search (arXiv 2602.20656)."""
