"""wanma: rows of tokens from text files."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reading import begin, measure, parse
from token_data import SEQUENCE, TokenData
from wanma_steps import batches_of_steps, prepare

from wanma.job.sections.data import DataSection


def main() -> None:
    options = parse(__doc__)
    data = TokenData.of(options)
    cache = options.folder / "wanma"
    section = DataSection(
        text=[str(data.text())], sequence_length=SEQUENCE, validation_fraction=0.0, cache=str(cache)
    )
    prepare(section)
    began = begin(options, data.text(), cache)
    with batches_of_steps(section, options) as batches:
        measure(batches, data.content_of_text(), options, began)


if __name__ == "__main__":
    main()
