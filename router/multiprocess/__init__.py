"""`slagate serve --processes N`: several processes that are one gateway.

Owns the parent, its children, and their services to each other. Imports `children`, `metrics`, `receipts`,
`reload`, `request`, `scheduling`, `services`, pools, workers and proto. Promises: the parent carries no
request; a child that ends is started again, and counts as nothing until then.
"""
