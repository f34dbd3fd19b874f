"""wanma: Parquet with token ids as it is; the first start copies the ids into a token file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reading import parse
from text_data import TextData
from wanma_steps import measure_text

from wanma.job.sections.data_sources import ColumnsSection


def main() -> None:
    options = parse(__doc__)
    data = TextData.of(options)
    content, columns = data.content_of_packed_parquet(), ColumnsSection(tokens="tokens")
    measure_text(options, data, data.parquet_files, content, columns=columns)


if __name__ == "__main__":
    main()
