"""Ranges of numbers that several settings share."""

from typing import Annotated

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
AboveZero = Annotated[float, Meta(gt=0)]
# A function of the user's, by its import path.
OwnCode = Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", title="package.module:function")]
# Larger ones give the same mix, a half of each image.
Alpha = Annotated[float, Meta(ge=0, le=1000)]
