"""wanma: archives or tables of images in a store, read through the node cache."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from image_data import SIZE, ImageData
from image_stores import write_parquet, write_tar
from made_data import made
from reading import begin, measure_link, parse
from remote_store import remote_store
from wanma_steps import batches_of_steps, prepare

from wanma.job.sections.data import DataSection
from wanma.job.sections.images import ImageTransformSection

WRITERS = {"tar": write_tar, "parquet": write_parquet}


def main() -> None:
    options = parse(__doc__, forms=tuple(WRITERS))
    data = ImageData.of(options)
    content = data.content()
    made(options.folder / "buckets", options.form, partial(WRITERS[options.form], data))
    with remote_store(options, options.folder / "buckets") as store:
        section = DataSection(
            images=[f"s3://{options.form}/*.{options.form}"],
            image_transform=ImageTransformSection(
                size=SIZE, augment=["random_resized_crop", "horizontal_flip"]
            ),
            validation_fraction=0.0,
            shuffle="block",  # as the guide says for stores
            block_samples="file",
            window_blocks=2,
            cache=str(store.cache),
            workers=max(options.workers, 1),
        )
        began = begin(options, bystanders=(store.process,))
        prepare(section)
        with batches_of_steps(section, options) as batches:
            measure_link(batches, content, options, began, store)


if __name__ == "__main__":
    main()
