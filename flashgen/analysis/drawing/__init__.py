"""Pictures of what the analysis proves: a tile map, or the elements of one tile.

tile_maps    as text for a terminal, and as SVG
cell_grid    the SVG grid of coloured cells
"""
