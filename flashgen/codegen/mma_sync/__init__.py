"""Kernels that use mma.sync: the families ampere and turing. Turing has no asynchronous copies."""
