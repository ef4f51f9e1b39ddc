"""Pool grids for people: as tables in the terminal, as SVG and PNG.

Owns what is said of a grid, and where it stands. Imports `receipts`, `tables`, pools and workers.
Promises: the same bytes wherever matplotlib is the same; it is an extra, imported when a picture is made.
"""
