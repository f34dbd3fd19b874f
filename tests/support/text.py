"""Text to train on in tests that compare numbers: one that no change of the code changes.

Rounding in 32 bits is small or large with the text: where a gradient happens to be next to nothing, AdamW
makes a step of full size of its sign.
"""

from __future__ import annotations

from pathlib import Path

REAL_TEXT = str(Path(__file__).parents[2] / "LICENSE")
