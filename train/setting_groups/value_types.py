"""Ranges of numbers that several settings share."""

from typing import Annotated

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
AboveZero = Annotated[float, Meta(gt=0)]
# Larger ones give the same mix, a half of each image.
Alpha = Annotated[float, Meta(ge=0, le=1000)]
