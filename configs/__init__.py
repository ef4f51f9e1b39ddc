"""Configs: data files only (engine arguments, grids, profiles, traces), read with `importlib.resources`."""
