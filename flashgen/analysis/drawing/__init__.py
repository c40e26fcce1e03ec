"""Pictures of a tile map, or of the elements of one tile.

tile_maps    draws them as text for a terminal, or as SVG
cell_grid    draws a grid of coloured cells as SVG
axes         draws the axes of a grid
palette      the colours of all pictures
"""
