"""wanma: a user brings a model, data and machines; wanma plans, launches, trains and reports.

The public names load on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
