"""Section `[data.image_transform]` of a job file: stored images as tensors of one shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section

BUILT_IN_CHANGES = ("random_resized_crop", "horizontal_flip")
"""Names of the random changes of images that come with wanma."""


class ImageTransformSection(Section):
    """Transform of stored images: size, augmentation, normalization."""

    size: int | None = Field(
        None,
        ge=1,
        le=16_384,
        description="height and width in pixels after resizing; unset: all images have one size already",
    )
    channels: Literal[1, 3] | None = Field(
        None, description="1: gray, 3: RGB; unset: 3 if an image among those sampled has colors"
    )
    augment: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="random changes of training images, drawn by (seed, sample): random_resized_crop, "
        "horizontal_flip; or names of entry points in the group wanma.image_transforms of installed packages",
    )
    mean: list[float] = Field(
        default_factory=list,
        description="mean by channel, of pixels in [0, 1]; unset: that of ImageNet, 0.5 for gray",
    )
    std: list[float] = Field(
        default_factory=list,
        description="standard deviation by channel, > 0; unset: that of ImageNet, 0.5 for gray",
    )

    @property
    def has_own_changes(self) -> bool:
        """True if `augment` names a transform of another package."""
        return not set(self.augment) <= set(BUILT_IN_CHANGES)

    @model_validator(mode="after")
    def _check_values(self) -> ImageTransformSection:
        if "random_resized_crop" in self.augment and self.size is None:
            raise ValueError("random_resized_crop needs a size")
        if duplicates := sorted({name for name in self.augment if self.augment.count(name) > 1}):
            raise ValueError(f"augment has {', '.join(duplicates)} twice")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) not in (0, 1, 3):
                raise ValueError(f"{name} has {len(values)} values; give one for each channel: 1 or 3")
        if self.std and min(self.std) <= 0:
            raise ValueError("each std must be > 0")
        return self
