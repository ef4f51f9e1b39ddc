"""`slagate grid lint`: what is legal in a fleet file, and probably not meant.

Owns the codes G1 to G6. Imports `fleet_file`, `grid`, `grid_build`, and of workers findings and profiles.
Promises: codes are stable; each finding has its place in the file (docs/lint.md).
"""
