"""Launches of rendered kernels: the engines that run them, and the bytes of their arguments.

engines              the GPU through CuPy, or the emulator: runners, streams
memory               workspaces of a call
argument_writer      writes values to the bytes of an argument struct
tensor_map_writer    writes structs that hold tensor maps of arrays
"""
