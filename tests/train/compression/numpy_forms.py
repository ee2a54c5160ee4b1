"""The compressors in numpy, written from their papers, one function a whole average."""

from __future__ import annotations

import numpy as np


def power_sgd(matrices, q):
    """Average matrices of all workers; return the mean, what each keeps, and the next Q."""
    p, _ = np.linalg.qr(np.mean([m @ q for m in matrices], 0))
    q = np.mean([m.T @ p for m in matrices], 0)
    mean = p @ q.T
    return mean, [m - mean for m in matrices], q


def top_k(matrices, count):
    """Average the `count` largest elements of each worker."""
    sent = []
    for m in matrices:
        flat, one = m.ravel(), np.zeros(m.size)
        places = np.argsort(-np.abs(flat), kind="stable")[:count]
        one[places] = flat[places]
        sent.append(one.reshape(m.shape))
    return np.mean(sent, 0), [m - s for m, s in zip(matrices, sent, strict=True)]


def unpacked(packed, bits):
    """Read codes by the layout that packing.py states, with Python's integers."""
    packed = [int(b) for b in packed]
    run = len(packed) // bits
    return [
        sum(((packed[p * run + j] >> place) & 1) << p for p in range(bits))
        for place in range(8)
        for j in range(run)
    ]


def range_of(bucket, bits):
    """Return a bucket's least value and the step between two codes."""
    return bucket.min(), (bucket.max() - bucket.min()) / (2**bits - 1)


def expected_error(x, bits, bucket):
    """Return the root of the expected squared error of stochastic rounding."""
    total = 0.0
    for at in range(0, x.size, bucket):
        part = x.ravel()[at : at + bucket]
        low, step = range_of(part, bits)
        share = (part - low) / step % 1
        total += np.sum(share * (1 - share)) * step**2
    return np.sqrt(total)


def two_bits(bucket):
    """Return a bucket of plus or minus two magnitudes: the means above the mean, and of the rest."""
    size = np.abs(bucket)
    high = size > size.mean()
    low = size[~high].mean() if (~high).any() else 0.0
    levels = np.where(high, size[high].mean() if high.any() else 0.0, low)
    return np.where(bucket < 0, -levels, levels)


def sparse_two_bits(matrices, count, chunk):
    """Average the `count` largest elements of each chunk of each worker, in two bits each."""
    sent = []
    for m in matrices:
        flat = np.concatenate([m.ravel(), np.zeros(-m.size % chunk)]).reshape(-1, chunk)
        one = np.zeros_like(flat)
        for row, values in zip(one, flat, strict=True):
            places = np.argsort(-np.abs(values), kind="stable")[:count]
            row[places] = two_bits(values[places])
        sent.append(one.ravel()[: m.size].reshape(m.shape))
    return np.mean(sent, 0), [m - s for m, s in zip(matrices, sent, strict=True)]
