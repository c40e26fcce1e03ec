"""Benchmarks behind the pages of this project's documentation; `python -m benchmarks --help` lists them.

They are no part of the installed package. `flashgen bench` compares kernels with those of other libraries.
"""
