"""wanma: Parquet with token ids as it is; the first start copies the ids into a token file."""

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
    measure_text(options, data, data.parquet_files, data.content_of_packed_parquet(), text_field="tokens")


if __name__ == "__main__":
    main()
