"""What a trained model can be exported as; imports no runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrypoint.core.errors import UserError, printable
from entrypoint.core.packages import require_extra

# The file of each format. An extra of the wheel with the format's name writes and checks it, except for torch's own.
TORCHS_OWN = "torch-export"
FORMATS: Mapping[str, str] = {
    "onnx": "model.onnx",
    TORCHS_OWN: "model.pt2",
    "openvino": "model.xml",
    "executorch": "model.pte",
}

# What `entrypoint quantize` and `average` write.
INT8_FILE, AVERAGE_FILE = "model.int8.onnx", "average.safetensors"


def check_formats(names: Sequence[str], source: str) -> None:
    """Raise `UserError` for a format that cannot be written here; `source` names them."""
    for name in names:
        if name not in FORMATS:
            raise UserError(f"{source}: {printable(name)!r} is no format. Use {', '.join(FORMATS)}.")
        if name != TORCHS_OWN:
            require_extra(name, source)
