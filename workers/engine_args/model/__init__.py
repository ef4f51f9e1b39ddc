"""The arguments that an engine may have, and how layers of them are merged.

Owns what is known of them by version, the model of those that rules read, and where each value came from.
Imports `runtime`. Promises: no rule is here, and no version but that of its facts is preferred.
"""
