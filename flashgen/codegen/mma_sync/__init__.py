"""The families of mma.sync: ampere, and turing, which has no asynchronous copies."""
