"""Stands in for TensorRT-LLM in worker processes of tests (`support.engine.double`)."""

import os
import sys

from support.engine.double import install

assert "TLLM_LOG_LEVEL" in os.environ, "is read when the package is imported"
install(sys.modules[__name__])
