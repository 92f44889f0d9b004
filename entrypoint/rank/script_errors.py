"""What to type where an error of a library does not say it: older programs with today's packages."""

from __future__ import annotations

from collections.abc import Mapping

# A part of the error's message in small letters, and the advice. docs/troubleshooting.md has the same.
ADVICE: Mapping[str, str] = {
    "no module named 'nni.compression.pytorch'": "NNI 3 renamed its modules."
    " Type `from nni.compression.pruning import …`; `ModelSpeedup` is in `nni.compression.speedup`.",
    "no module named 'oneccl_bindings_for_pytorch'": "oneCCL's bindings are not on PyPI, and ended with torch 2.8."
    ' Drop the import and type `backend="gloo"`, or build the image cpu-intel with ONECCL_INDEX.',
    "backend type ccl": "oneCCL's bindings are not imported."
    ' Type `backend="gloo"`, or import oneccl_bindings_for_pytorch first.',
    "distributed package doesn't have mpi built in": "Wheels of torch have no MPI."
    ' Type `backend="gloo"`; mpirun still starts the ranks.',
}


def advice(error: BaseException) -> str:
    """Return what to type to get past an error that ended a script, empty where nothing is known of it."""
    message = str(error).lower()
    return next((text for part, text in ADVICE.items() if part in message), "")
