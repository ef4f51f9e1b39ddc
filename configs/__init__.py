"""Configs: data files only (grids, timing profiles, traces), read with `importlib.resources`."""
