"""The commands: options, usage errors, output, exit statuses. What they do is in the rooms below.

Owns the words of the command line. Imports `app`, `client`, `multiprocess`, `output`, `receipts`,
`reload`, `request`, `services`, `tables`, pools, workers and proto.
Promises: exit status 0 when all is well, 1 when work failed or something was found, 2 when what was asked
for cannot be used, 130 after Ctrl-C; no traceback for a mistake.
"""
