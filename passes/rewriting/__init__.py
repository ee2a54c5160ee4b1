"""Passes that change a jaxpr: they make rings, pin results, prefetch weights, scatter sums.

A ring is a collective decomposed into collective-permutes, and its matmuls into chunks that run
between them (collective matmul, windowed einsum).
"""
