"""fleet_file: a room of `pools`."""
