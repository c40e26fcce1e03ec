"""Closed forms of a mask over a tile: from its predicate to the bounds of a loop.

affine           canonical affine forms of integer nodes
normal_form      a predicate as a disjunction of conjunctions of affine comparisons
inequalities     provable comparisons of nodes, and minima and maxima simplified by them
row_ranges       the contiguous range of positions that a conjunction allows in a row
tile_ranges      the range of a tile, and the part of it that needs no mask: key_range, query_range
open_parts       bounds of a predicate in which an array decides about few keys
monotonicity     which bounds increase or decrease from tile to tile
distances        what depends on q and k only through their difference
uniform_tiles    when all scores of a tile read the same elements of captured arrays
"""
