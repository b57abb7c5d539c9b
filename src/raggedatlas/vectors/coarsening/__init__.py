"""How each geometry type becomes coarser: points, lines, graphs and skeletons, meshes."""
