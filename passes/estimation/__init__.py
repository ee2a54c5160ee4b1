"""Estimate a program's seconds and live memory before it is compiled: tasks, orders, kernels."""
