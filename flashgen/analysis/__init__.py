"""What can be proven of a mask, and the derivatives of scores.

closed_forms/        by a tile's ends: which keys its queries may attend to, the reverse, and what its scores share
intervals/           what is certain of any expression over boxes of indices
tile_classes         the class of every tile: tile_map
tile_elements        which scores of one tile a mask keeps: tile_elements
captured_extents     how many sequences and heads the captured arrays of a mask are for
integer_bounds       what an integer of an expression may be in any call, whether int32 holds it
drawing/             a tile map, or one tile, as text and as SVG
derivatives          of score functions: derivative, gathers
derivative_algebra   nodes of real arithmetic, cleaned up as derivatives build them
expression_text      a node as a person would write it
"""
