"""Plans, binds and launches PyTorch training on what a node really offers, with an accelerated trainer.

In an environment of the user's this is the only name that the project takes. Its other packages are in a folder that
only its own processes put on their path.
"""

from __future__ import annotations

__version__ = "0.2.0"
