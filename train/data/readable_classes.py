"""Read one image of each class before training, so that a streamed set has no class without images."""

from __future__ import annotations

from train.data.decoding.decoder import read_image
from train.data.sources.image_folder import ImageList, UnreadableImage, check_classes
from train.settings import ImageShape


def probe_classes(listing: ImageList, shape: ImageShape) -> tuple[UnreadableImage, ...]:
    """Read images of each class until one can be read; return the unreadable ones before it.

    Raises `UserError` for a class without any. It decodes one image of each class, if no image is damaged.
    """
    readable: set[int] = set()
    bad: dict[int, UnreadableImage] = {}
    for row, label in enumerate(listing.labels):
        if label in readable:
            continue
        image = read_image(listing.files[row], shape)
        if isinstance(image, UnreadableImage):
            bad[row] = image
        else:
            readable.add(label)
    check_classes(listing, readable, bad)
    return tuple(bad.values())
