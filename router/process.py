"""How another process of slagate is started, by the gateway itself and by the tools."""

import sys

# Isolated: a module that lies where the user stands must not take the place of one of ours.
SLAGATE = (sys.executable, "-I", "-m", "slagate.router")
