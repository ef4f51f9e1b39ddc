"""`slagate bench`, `slagate demo` and `slagate profile ...`: their options.

Owns the options; the work is in the rooms of those names. Imports `bench`, `cli`, `cli/worker`, `client`,
`demo`, `loadgen`, `output`, `profiles`, `request`, `tables`, pools and workers.
"""
