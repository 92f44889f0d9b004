"""The compiled JPEG decoder gives Pillow's bytes, or leaves the file to Pillow."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train.kernels
from tests.conftest import PYTHON
from tests.train.data.jpeg_files import KINDS, WHOLE, compare, image_of, jpeg, random_files, random_view
from train.data.decoding.decoder import JpegKernel, check_kernel, jpeg_kernel
from train.kernels.library import find_kernel
from train.transforms.image_part import PLAIN_VIEW, View

ROOT = Path(__file__).parents[4]
SOURCE = Path(train.kernels.__file__).with_name("jpeg.cpp")


needs_kernel = pytest.mark.usefixtures("kernel")


@pytest.fixture
def kernel() -> JpegKernel:
    found = jpeg_kernel()
    if found is None:
        pytest.skip("needs the compiled JPEG decoder: g++ and libjpeg's headers at the set-up")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_decodes_to_the_bytes_of_pillow(kernel: JpegKernel, kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(12):
        data = jpeg(image_of(draw, draw.randint(1, 400), draw.randint(1, 400)), **KINDS[kind])
        for side in (1, 8, 32, 100, 224):
            size = side, draw.randint(1, 2 * side)
            assert compare(kernel, data, size) == "equal", (size, "fitted")
            assert compare(kernel, data, size, random_view(draw, size)) == "equal", (size, "random view")


@pytest.mark.parametrize("channels", [1, 3])
def test_kernel_decodes_gray_images(kernel: JpegKernel, tmp_path: Path, channels: int) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(jpeg(image_of(random.Random(1), 61, 40, "L")))
    target = np.zeros((20, 30, channels), np.uint8)
    assert kernel.decode(path.read_bytes(), target, WHOLE)
    with Image.open(path) as image:
        expected = np.asarray(image.resize((30, 20), Image.Resampling.BILINEAR), dtype=int)
    assert np.abs(target.astype(int) - expected[:, :, None]).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_kernel_turns_images_as_pillow(kernel: JpegKernel, orientation: int) -> None:
    draw, exif = random.Random(orientation), Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(image_of(draw, 83, 51), exif=exif)
    for size in ((24, 24), (20, 31), (83, 51), (51, 83)):
        assert compare(kernel, data, size) == "equal"
        assert compare(kernel, data, size, random_view(draw, size)) == "equal"


def two_exif_segments(data: bytes) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    segment = exif.tobytes()
    marker = b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment
    return data[:2] + marker + marker + data[2:]


def xmp_orientation(data: bytes) -> bytes:
    text = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    return data[:2] + b"\xff\xe1" + (len(text) + 2).to_bytes(2, "big") + text + data[2:]


def odd_exif(data: bytes) -> bytes:
    text = b"Exif\0\0XX*\0garbage"
    return data[:2] + b"\xff\xe1" + (len(text) + 2).to_bytes(2, "big") + text + data[2:]


PLAIN = jpeg(image_of(random.Random(2), 90, 70))
DECLINED: dict[str, bytes] = {
    "CMYK": jpeg(image_of(random.Random(3), 20, 20, "CMYK")),
    "cut": PLAIN[: len(PLAIN) // 2],
    "cut in the last row": PLAIN[:-30],
    "empty": b"",
    "three bytes": b"\xff\xd8\xff",
    "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "two Exif segments": two_exif_segments(PLAIN),
    "orientation in XMP": xmp_orientation(PLAIN),
    "more pixels than Pillow takes": PLAIN.replace(b"\0\x46\0\x5a", b"\xff\xff\xff\xff", 1),
}


def scans_of(data: bytes) -> list[int]:
    """Return where each scan of a JPEG begins."""
    return [place for place in range(len(data) - 1) if data[place : place + 2] == b"\xff\xda"]


@pytest.mark.parametrize("scans", range(1, 10))
def test_progressive_file_without_late_scans_is_equal(kernel: JpegKernel, scans: int) -> None:
    """libjpeg smooths what the missing scans would have said, with all neighbors of a block."""
    draw = random.Random(7)
    data = jpeg(image_of(draw, 230, 170), progressive=True, quality=85)
    starts = scans_of(data)
    assert len(starts) > scans
    cut = data[: starts[scans]] + b"\xff\xd9"
    for _ in range(4):
        assert compare(kernel, cut, (50, 40), random_view(draw, (50, 40))) in ("equal", "declined")
    assert compare(kernel, cut, (50, 40)) in ("equal", "declined")


def test_exif_in_another_segment_is_not_the_orientation(kernel: JpegKernel) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    comment = b"\xff\xfe" + (len(exif.tobytes()) + 2).to_bytes(2, "big") + exif.tobytes()
    upright = Image.Exif()
    upright[0x0112] = 1
    data = jpeg(image_of(random.Random(8), 60, 40), exif=upright)
    assert compare(kernel, data[:2] + comment + data[2:], (30, 20)) == "equal"


def test_odd_exif_segment_is_no_orientation(kernel: JpegKernel) -> None:
    assert compare(kernel, odd_exif(PLAIN), (30, 20)) == "equal"


def test_damage_below_the_crop_counts(kernel: JpegKernel) -> None:
    """Whether a file can be read must not depend on the crop that is drawn."""
    data = bytearray(jpeg(image_of(random.Random(9), 200, 200), quality=90))
    data[-400:-200] = bytes(200)
    top = View(lambda size: (0.0, 0.0, float(size[0]), size[1] / 4))
    found = np.zeros((20, 20, 3), np.uint8)
    assert kernel.decode(bytes(data), found) == kernel.decode(bytes(data), found, top) is False


SHORT_OF_MEMORY = """
import resource, sys
import numpy as np
from io import BytesIO
from PIL import Image
from train.data.decoding.decoder import decode_image
Image.new("RGB", (13000, 13000)).save(file := BytesIO(), "JPEG")
target = np.zeros((9, 9, 3), np.uint8)
decode_image(file.getvalue()[:2] + file.getvalue()[2:], np.zeros((1, 1, 3), np.uint8))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), -1))
try:
    decode_image(file.getvalue(), np.zeros((12000, 300, 3), np.uint8))
except MemoryError:
    print("MemoryError")
else:
    print("decoded")
"""


@needs_kernel
@pytest.mark.launch
@pytest.mark.parametrize("room", [1 << 20, 8 << 20])
def test_short_memory_is_a_memory_error(room: int) -> None:
    done = subprocess.run([PYTHON, "-c", SHORT_OF_MEMORY, str(room)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("MemoryError\n", "decoded\n")


@pytest.mark.parametrize("what", DECLINED)
def test_kernel_leaves_the_rest_to_pillow(kernel: JpegKernel, what: str) -> None:
    target = np.zeros((8, 8, 3), np.uint8)
    assert not kernel.decode(DECLINED[what], target, WHOLE)
    assert compare(kernel, PLAIN, (8, 8)) == "equal", "the decoder is whole afterwards"


def test_kernel_leaves_color_images_in_a_gray_set_to_pillow(kernel: JpegKernel) -> None:
    target = np.zeros((8, 8, 1), np.uint8)
    assert not kernel.decode(PLAIN, target, WHOLE)


@pytest.mark.seconds
def test_kernel_agrees_with_pillow_on_damaged_files(kernel: JpegKernel) -> None:
    """A kernel that gave pixels where Pillow gives others, or none, would train on what the library path does not."""
    results = [compare(kernel, data, (40, 30), WHOLE) for data in random_files(0, 400)]
    assert set(results) == {"declined", "equal"}
    assert results.count("equal") > 20
    assert results.count("declined") > 100


@needs_kernel
def test_check_names_what_is_wrong_with_a_library(tmp_path: Path) -> None:
    assert check_kernel(find_kernel("jpeg") or Path()) == ""
    (tmp_path / "x.so").write_bytes(b"no library")
    assert check_kernel(tmp_path / "x.so").startswith("it cannot be loaded (")


@needs_kernel
def test_check_finds_other_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_off(self: JpegKernel, data: bytes, target: np.ndarray, view: View = PLAIN_VIEW) -> bool:
        done = decode(self, data, target, view)
        target[0, 0, 0] ^= 1
        return done

    decode = JpegKernel.decode
    monkeypatch.setattr(JpegKernel, "decode", one_off)
    assert check_kernel(find_kernel("jpeg") or Path()) == "its pixels differ from Pillow's at 61x47 to 32x32"


@needs_kernel
@pytest.mark.slow
@pytest.mark.launch
def test_kernel_has_no_memory_errors_on_damaged_files(tmp_path: Path) -> None:
    """Compiled with the address and undefined-behavior sanitizers, whose first finding ends the process."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(Path(one).is_absolute() for one in found):
        pytest.skip("needs the libraries of g++'s sanitizers")
    library = next(Path(sysconfig.get_path("platlib"), "pillow.libs").glob("libjpeg-*.so*"))
    sanitized = tmp_path / "kernel.so"
    options = ("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-ffp-contract=off", "-fno-sanitize-recover=all")
    linked = ("-fsanitize=address,undefined", library, f"-Wl,-rpath,{library.parent}")
    subprocess.run([compiler, *options, SOURCE, *linked, "-o", sanitized], check=True)
    env = {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    count = os.environ.get("DAMAGED_JPEGS", "2000")
    command = [PYTHON, "-m", "tests.train.data.jpeg_files", str(sanitized), "1", count]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Sanitizer" not in done.stderr
    assert "other pixels" not in done.stdout, done.stdout
    assert "Pillow refuses" not in done.stdout, done.stdout
