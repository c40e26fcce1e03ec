"""A rendered kernel on an engine: where it runs, and the bytes of its arguments.

engines              the GPU through CuPy, or the emulator: memory, runners, streams
argument_writer      values to the bytes of an argument struct
tensor_map_writer    structs in which tensor maps stand for arrays
"""
