"""`slagate grid build`: a fleet file from pools and targets, for each cell the cheapest pool that meets it.

Owns the build spec. Imports `fleet_file`, `grid` and workers, for timing profiles.
Promises: the file that it writes loads; a cell that cannot be met is named (docs/build.md).
"""
