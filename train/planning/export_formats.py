"""What a trained model can be exported as; imports no runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entrypoint.core.errors import UserError, printable
from entrypoint.core.packages import require_extra


@dataclass(frozen=True)
class ExportFormat:
    """The name of a format's file, and the extra of the wheel that writes and checks it, empty for torch alone."""

    file: str
    extra: str


FORMATS: Mapping[str, ExportFormat] = {
    "onnx": ExportFormat("model.onnx", "onnx"),
    "torch-export": ExportFormat("model.pt2", ""),
    "openvino": ExportFormat("model.xml", "openvino"),
    "executorch": ExportFormat("model.pte", "executorch"),
}

# What `entrypoint quantize` writes.
INT8_FILE = "model.int8.onnx"


def check_formats(names: Sequence[str], source: str) -> tuple[str, ...]:
    """Return the formats that `source` names, each once; raises `UserError` for one that cannot be written here."""
    for name in names:
        if name not in FORMATS:
            raise UserError(f"{source}: {printable(name)!r} is no format. Use {', '.join(FORMATS)}.")
        if FORMATS[name].extra:
            require_extra(FORMATS[name].extra, source)
    return tuple(dict.fromkeys(names))
