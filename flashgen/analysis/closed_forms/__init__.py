"""A mask as closed forms over a tile: from its predicate to the begin and end of a loop.

affine         canonical affine forms of integer nodes
normal_form    a predicate as a disjunction of conjunctions of affine comparisons
inequalities   provable comparisons of nodes, and the shortest min and max that they allow
row_runs       the one run of positions that a conjunction leaves in a row
tile_ranges    the run of a whole tile, and its stretch without a masked element: key_range, query_range
open_parts     what is certain of a predicate that an array decides for few keys
monotone       what rises or falls from tile to tile
distances      what depends on q and k only by how far they are apart
alike_tiles    when all scores of a tile read the same elements of captured arrays
"""
