"""A rendered kernel on an engine: where it runs, and the bytes of its arguments.

engines              the GPU through CuPy, or the emulator: runners, streams
memory               what a call takes for its own use
argument_writer      values to the bytes of an argument struct
tensor_map_writer    structs in which tensor maps stand for arrays
"""
