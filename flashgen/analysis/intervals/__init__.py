"""Three-valued interval arithmetic: sound for every element of a box, and never more certain than the elements are.

interval         intervals of integers, floats and truth values, as arrays of lows and highs
evaluation       the value of any node over boxes of indices
array_extrema    the least and greatest element of a captured array over boxes
"""
