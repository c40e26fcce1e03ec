"""Three-valued interval arithmetic, valid for every element of a box.

interval         intervals of integers, floats and truth values, as arrays of lower and upper bounds
evaluation       the interval of any node over boxes of indices
array_extrema    the minimum and maximum of a captured array over boxes of indices
"""
