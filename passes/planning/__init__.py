"""Decide which matmuls share which rings, and whether a ring pays.

A ring is a collective decomposed into collective-permutes, and its matmuls into chunks that run
between them (collective matmul, windowed einsum).
"""
