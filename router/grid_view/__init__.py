"""Pool grids for people: as tables in the terminal, as SVG and PNG.

Owns the texts and the layout of a grid. Imports `receipts`, `tables`, pools and workers.
Promises: the same bytes wherever matplotlib is the same; it is an extra, imported when a picture is made.
"""
