"""How commands call a gateway or a worker, and why they cannot.

Owns the words for a call that fails. Imports workers and proto.
Promises: a failed call is one `CallFailed` with a message for people.
"""
