"""`slagate bench`, `slagate demo`, `slagate profile ...` and `slagate replay`: their options.

Owns the options; the work is in the rooms of those names. Imports `bench`, `cli`, `cli/worker`, `client`,
`demo`, `loadgen`, `output`, `profiles`, `replay`, `request`, `tables`, pools and workers.
"""
