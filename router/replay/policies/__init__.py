"""Other routers' policies, each a pure module from its published formula: tools, not serving options.

Owns a policy's state during one run, the table of all policies, and noise on what they are told. Imports
`request`, `scheduling`, pools and workers.
Promises: a policy reads views and draws, and nothing else; what it cites is in its module.
"""
