"""Stored images as arrays: decoded, cropped, resized, flipped and normalized."""

from __future__ import annotations

import io
from itertools import islice, repeat
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wanma.data.images.transform import ImageTransform, fit_transform, open_image, uniform_draws
from wanma.job.errors import JobError
from wanma.job.sections.images import ImageTransformSection

PLAIN = ImageTransform(8, 8, 3, (0, 0, 0), (1, 1, 1), resizes=True, converts_colors=False)


def encoded(pixels: Any, kind: str = "png", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(stream, kind, **options)
    return stream.getvalue()


def changed(value: Any, draws: Any = None, **fields: Any) -> np.ndarray:
    from dataclasses import replace

    transform = replace(PLAIN, **fields)
    out = np.empty(transform.shape, np.float32)
    transform.write(value, out, draws)
    return out


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3)).astype("u1")


def test_pixels_of_the_right_size_stay_as_they_are() -> None:
    pixels = noise(8, 8)
    expected = pixels.transpose(2, 0, 1) / np.float32(255)
    assert np.allclose(changed(encoded(pixels)), expected, atol=1e-6)
    assert np.allclose(changed(pixels), expected, atol=1e-6)
    assert np.allclose(changed(pixels.transpose(2, 0, 1)), expected, atol=1e-6)
    assert np.allclose(changed([encoded(pixels)]), expected, atol=1e-6)
    assert np.allclose(changed({"bytes": encoded(pixels), "path": None}), expected, atol=1e-6)
    assert np.allclose(changed(memoryview(encoded(pixels))), expected, atol=1e-6)


def test_mean_and_deviation_are_applied_by_channel() -> None:
    found = changed(np.full((8, 8, 3), 255, "u1"), mean=(0.5, 0.0, 1.0), std=(0.5, 2.0, 4.0))
    assert found[:, 0, 0].tolist() == [1.0, 0.5, 0.0]


def test_the_middle_is_taken_and_resized() -> None:
    pixels = np.zeros((16, 40, 3), "u1")
    pixels[:, 12:28] = 255
    wide, high = changed(encoded(pixels)), changed(encoded(pixels.transpose(1, 0, 2)))
    assert (wide[:, :, 1:-1] == 1).all()
    assert (wide > 0.8).all(), "the filter reaches over the edge"
    assert np.array_equal(high, wide.transpose(0, 2, 1))


def test_a_jpeg_decoded_at_a_fraction_of_its_size_looks_the_same() -> None:
    y, x = np.mgrid[0:400, 0:640]
    pixels = np.stack([x * 255 // 640, y * 255 // 400, (x + y) % 256 // 2], 2)
    jpeg = encoded(pixels, "jpeg", quality=95)
    reference = (
        Image.open(io.BytesIO(jpeg))
        .convert("RGB")
        .resize((20, 20), Image.Resampling.BILINEAR, (120, 0, 520, 400))
    )
    found = changed(jpeg, height=20, width=20)
    difference = np.abs(found - np.asarray(reference).transpose(2, 0, 1) / 255)
    assert difference.mean() < 0.01
    assert difference.max() < 0.1


def test_random_crops_follow_their_draws_and_stay_inside() -> None:
    pixels = noise(50, 30)
    results = []
    for sample in range(200):
        results.append(changed(pixels, uniform_draws(7, "augment", sample), augment=("random_resized_crop",)))
    again = changed(pixels, uniform_draws(7, "augment", 3), augment=("random_resized_crop",))
    assert np.array_equal(results[3], again)
    assert len({one.tobytes() for one in results}) == 200
    assert all(one.min() >= 0 and one.max() <= 1 for one in results)


def test_a_crop_of_the_whole_image_is_possible_and_thin_images_are_cut_in_the_middle() -> None:
    thin = noise(4, 300)
    found = changed(thin, uniform_draws(1), augment=("random_resized_crop",))
    assert found.shape == (3, 8, 8)
    one_pixel = changed(noise(1, 1), uniform_draws(1), augment=("random_resized_crop",))
    assert np.ptp(one_pixel, axis=(1, 2)).max() == 0


def test_half_of_the_images_are_flipped() -> None:
    pixels = noise(8, 8)
    plain, augment = changed(pixels), ("horizontal_flip",)
    assert np.array_equal(changed(pixels, repeat(0.4), augment=augment), plain[:, :, ::-1])
    assert np.array_equal(changed(pixels, repeat(0.6), augment=augment), plain)
    assert np.array_equal(changed(pixels, None, augment=augment), plain)


def test_draws_are_uniform_and_depend_on_their_key_alone() -> None:
    values = list(islice(uniform_draws(5, "augment", 9), 5000))
    assert values == list(islice(uniform_draws(5, "augment", 9), 5000))
    assert values[:8] != list(islice(uniform_draws(5, "augment", 10), 8))
    assert min(values) >= 0
    assert max(values) < 1
    assert np.mean(values) == pytest.approx(0.5, abs=0.02)
    assert np.std(values) == pytest.approx(12**-0.5, abs=0.02)
    assert next(uniform_draws(1, "augment", 0)) == 0.6598129667501593, "the same on every machine"


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (b"", "the image is empty"),
        (b"not an image", "the content is no image"),
        (encoded(noise(8, 8))[:-60], "cannot be decoded"),
        (encoded(noise(64, 64), "jpeg")[:200], "cannot be decoded"),
        (np.zeros((8, 8, 2), "u1"), r"shape \(8, 8, 2\) is no image"),
        (np.zeros((8, 8), "f4"), "an array of float32 is no image"),
        (np.zeros((0, 8), "u1"), "is no image"),
        ({"bytes": None, "path": "a.png"}, "names the image 'a.png'"),
        (7, "int is no image"),
    ],
)
def test_damaged_images_are_value_errors(value: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        changed(value)


def test_pixels_of_sixteen_bits_are_refused() -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(stream, "png")
    with pytest.raises(ValueError, match="more than 8 bits"):
        changed(stream.getvalue())


@pytest.mark.parametrize(
    ("mode", "channels"), [("L", 1), ("1", 1), ("LA", 1), ("P", 3), ("RGBA", 3), ("RGB", 3), ("CMYK", 3)]
)
def test_each_mode_becomes_gray_or_rgb(mode: str, channels: int) -> None:
    stream = io.BytesIO()
    image = Image.fromarray(noise(8, 8)).convert(mode)
    image.save(stream, "tiff" if mode == "CMYK" else "png")
    transform = fit_transform(ImageTransformSection(size=8), [open_image(stream.getvalue())])
    assert transform.channels == channels
    out = np.empty(transform.shape, np.float32)
    transform.write(stream.getvalue(), out)
    assert np.isfinite(out).all()


def test_statistics_need_a_value_for_each_channel() -> None:
    image = open_image(encoded(noise(8, 8)))
    assert fit_transform(ImageTransformSection(mean=[0.1], std=[0.2]), [image]).mean == (0.1, 0.1, 0.1)
    with pytest.raises(JobError, match=r"mean has 3 values .* 1 channel"):
        fit_transform(ImageTransformSection(mean=[0.1, 0.2, 0.3], channels=1), [image])
