"""sbom.py IMAGE VENV: the image's bill of materials, every wheel and Debian package, as CycloneDX JSON on stdout.

The same packages give the same bytes: it holds no time, and its serial number is made from its content.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL


def wheels(venv: str) -> Iterator[Component]:
    """Yield the distributions of a virtual environment."""
    for one in distributions(path=[f"{venv}/lib/python3.11/site-packages"]):
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        purl = PackageURL("pypi", name=name, version=one.version)
        yield component(purl, licence_of(one))


def licence_of(one: Distribution) -> str:
    """Return what a distribution's metadata calls its licence, as short as it does."""
    fields = one.metadata
    classified = [text.rsplit(" :: ", 1)[-1] for text in fields.get_all("Classifier", []) if text.startswith("License")]
    written = fields.get("License-Expression") or " AND ".join(classified) or fields.get("License") or ""
    return written.splitlines()[0][:200] if written else ""


def debian() -> Iterator[Component]:
    """Yield the installed Debian packages; their licences lie in /usr/share/doc/<package>/copyright."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\\n"]
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        name, version, architecture = line.split()
        purl = PackageURL("deb", "debian", name, version, {"arch": architecture, "distro": "debian-12"})
        yield component(purl, "")


def component(purl: PackageURL, licence: str) -> Component:
    """Return one part, named by its package URL."""
    return Component(
        type=ComponentType.LIBRARY,
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=purl.to_string(),
        licenses=[LicenseFactory().make_from_string(licence)] if licence else [],
    )


def main(image: str, venv: str) -> None:
    """Print the bill of materials of the image that this runs in."""
    parts = sorted([*wheels(venv), *debian()], key=lambda part: str(part.bom_ref))
    ours = next(part for part in parts if part.name == "reference-training")
    bom = Bom(components=[part for part in parts if part is not ours])
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER, name=f"reference-training:{image}", version=ours.version, bom_ref="image"
    )
    content = "\n".join(str(part.bom_ref) for part in parts)
    bom.serial_number = uuid5(NAMESPACE_URL, content)
    made = json.loads(JsonV1Dot6(bom).output_as_string())
    del made["metadata"]["timestamp"]
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
