"""TensorRT-LLM's own bindings of OpenEngine, of the branch that vendors them: imported with this package.

The file names are those of PIN.md @5e702443 and of the newest `_generated/error_pb2.py` (id 68384366367).
"""

from . import error_pb2

__all__ = ["error_pb2"]
