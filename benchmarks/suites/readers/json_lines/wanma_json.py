"""wanma: JSON lines as they are; the first start tokenizes them by processes, and keeps the tokens."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reading import parse
from text_data import TextData
from wanma_steps import measure_text


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    measure_text(options, data, data.json_files, data.content_of_packed_json())


if __name__ == "__main__":
    main()
