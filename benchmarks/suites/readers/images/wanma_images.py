"""wanma: an image folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from image_data import SIZE, ImageData
from reading import begin, measure, parse
from wanma_steps import batches_of_steps, prepare

from wanma.job.sections.data import DataSection
from wanma.job.sections.images import ImageTransformSection


def main() -> None:
    options = parse(__doc__)
    data = ImageData.of(options)
    section = DataSection(
        images=[str(data.image_folder)],
        image_transform=ImageTransformSection(size=SIZE, augment=["random_resized_crop", "horizontal_flip"]),
        validation_fraction=0.0,
        cache=str(options.folder / "wanma"),
        workers=max(options.workers, 1),
    )
    prepare(section)
    began = begin(options, data.image_folder)
    with batches_of_steps(section, options) as batches:
        measure(batches, data.content(), options, began)


if __name__ == "__main__":
    main()
