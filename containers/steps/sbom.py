"""sbom.py IMAGE VENV: the image's bill of materials, every wheel and Debian package, as CycloneDX JSON on stdout.

Each part has a supplier, a version, a package URL, a hash, its license and what it depends on: NTIA's minimum and
more. A wheel lists the shared libraries that it brings. The time is CREATED of the environment. The serial number is
made from the content: the same packages at the same time give the same bytes.

A wheel's hash is that of its RECORD, which holds a hash of each file. A Debian package's is that of dpkg's list.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from base64 import urlsafe_b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parseaddr
from hashlib import sha256
from importlib.metadata import Distribution, distributions
from pathlib import Path
from platform import freedesktop_os_release
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalContact, OrganizationalEntity
from cyclonedx.model.license import License, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

PROJECT = "reference-training"
DPKG = Path("/var/lib/dpkg/info")
DEBIAN_FIELDS = (
    "Package",
    "source:Package",
    "Version",
    "Architecture",
    "Maintainer",
    "Pre-Depends",
    "Depends",
    "Provides",
)


@dataclass(frozen=True)
class Part:
    """A wheel or a Debian package, with the names of those that it needs."""

    component: Component
    needs: tuple[str, ...]


def wheels(venv: str) -> Iterator[tuple[str, Part]]:
    """Yield the distributions of a virtual environment by their names."""
    for one in distributions(path=[str(path) for path in Path(venv).glob("lib/python3*/site-packages")]):
        name = normal(one.name)
        purl = PackageURL("pypi", name=name, version=one.version)
        record = one.read_text("RECORD") or ""
        part = component(
            purl, supplier_of(one), licenses_of_wheel(one), record.encode(), "dist-info/RECORD", bundled(one, purl)
        )
        requirements = [Requirement(text) for text in one.requires or ()]
        needs = [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
        yield name, Part(part, tuple(normal(each) for each in needs))


def normal(name: str) -> str:
    """Return a distribution's name as the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def supplier_of(one: Distribution) -> str:
    """Return who wrote or maintains a distribution, by its own metadata."""
    for who in ("Author", "Author-email", "Maintainer", "Maintainer-email"):
        written = one.metadata.get(who) or ""
        name = (parseaddr(written)[0] or parseaddr(written)[1]) if who.endswith("email") else written
        if name.strip() and name != "UNKNOWN":
            return " ".join(name.split())[:200]
    return f"the project {one.name} on the package index"


def licenses_of_wheel(one: Distribution) -> list[License]:
    """Return what a distribution's metadata calls its license, as short as it does."""
    fields = one.metadata
    classified = [text.rsplit(" :: ", 1)[-1] for text in fields.get_all("Classifier", []) if text.startswith("License")]
    written = fields.get("License-Expression") or " AND ".join(classified) or fields.get("License") or ""
    if written in ("", "UNKNOWN"):  # then the file of the license says it in its first line
        written = (one.read_text("LICENSE") or "").strip()
    return [LicenseFactory().make_from_string(written.splitlines()[0][:200])] if written else []


def bundled(one: Distribution, purl: PackageURL) -> Iterator[Component]:
    """Yield the shared libraries that a wheel brings, with the hashes of its RECORD."""
    for file in one.files or ():
        if not re.match(r"lib.+\.so(\.[\d.]+)?$", file.name) or not file.hash or not Path(str(file.locate())).exists():
            continue
        digest = urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()
        yield Component(
            type=ComponentType.FILE,
            name=str(file),
            bom_ref=f"{purl.to_string()}#{file}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )


def debian() -> Iterator[tuple[str, Part]]:
    """Yield the installed Debian packages by their names, and by those that they provide."""
    release = freedesktop_os_release()["VERSION_ID"]
    query = ["dpkg-query", "-W", "-f", "\\t".join(f"${{{name}}}" for name in DEBIAN_FIELDS) + "\\n"]
    lines = [
        one.split("\t") for one in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    # Those of one source have one file of licenses, and links to it, which slim bases leave out.
    of_source = {source: copyright_of(name) for name, source, *_ in lines if copyright_of(name).exists()}
    bare = [name for name, source, *_ in lines if source not in of_source]
    if bare:
        print(
            f"sbom.py: no license is known of {len(bare)} packages without /usr/share/doc/*/copyright", file=sys.stderr
        )
    for name, source, version, architecture, maintainer, *relations in lines:
        purl = PackageURL("deb", "debian", name, version, {"arch": architecture, "distro": f"debian-{release}"})
        stems = (f"{name}:{architecture}", name)
        lists = [DPKG / f"{stem}.{kind}" for kind in ("md5sums", "list") for stem in stems]
        listed = next((path for path in lists if path.exists()), None)
        content = listed.read_bytes() if listed else f"{name} {version}".encode()
        supplier = parseaddr(maintainer)[0] or maintainer or "Debian"
        origin = f"dpkg's {listed.name}" if listed else "dpkg's status"
        licenses = debian_licenses(of_source.get(source, copyright_of(name)))
        part = component(purl, f"Debian: {supplier}", licenses, content, origin)
        yield name, Part(part, tuple(filter(None, re.split(r"\s*,\s*", ", ".join(relations[:2])))))
        for provided in filter(None, re.split(r"\s*,\s*", relations[2])):
            yield f"provided {first_word(provided)}", Part(part, ())


def first_word(relation: str) -> str:
    """Return the package's name in a relation such as `libc6:any (>= 2.36)`."""
    return re.split(r"[\s(:]", relation.strip(), maxsplit=1)[0]


def copyright_of(name: str) -> Path:
    """Return the file that says the licenses of a Debian package."""
    return Path("/usr/share/doc", name, "copyright")


def debian_licenses(path: Path) -> list[License]:
    """Return the licenses that a package's file names, none where it is not there or says none."""
    text = path.read_text(errors="replace") if path.exists() else ""
    names = re.findall(r"^License: *(\S.*)$", text, re.MULTILINE)
    names = names or re.findall(r"/usr/share/common-licenses/([\w.+-]*\w)", text)
    factory, licenses = LicenseFactory(), []
    for written in sorted({each.strip()[:200] for each in names}):
        made = factory.make_from_string(written)
        licenses.append(factory.make_with_name(written) if isinstance(made, LicenseExpression) else made)
    return licenses


def component(
    purl: PackageURL,
    supplier: str,
    licenses: Sequence[License],
    hashed: bytes,
    origin: str,
    components: Iterator[Component] | None = None,
) -> Component:
    """Return one part, named by its package URL; its hash is that of `hashed`, which `origin` names."""
    return Component(
        type=ComponentType.LIBRARY,
        name=purl.name,
        version=purl.version,
        purl=purl,
        bom_ref=purl.to_string(),
        supplier=OrganizationalEntity(name=supplier),
        licenses=licenses,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256(hashed).hexdigest())],
        properties=[Property(name=f"{PROJECT}:hash-of", value=origin)],
        components=components or (),
    )


def needed_by(part: Part, parts: Mapping[str, Part]) -> list[Component]:
    """Return what a part depends on: of Debian's alternatives the first that is installed."""
    found = []
    for relation in part.needs:
        names = [first_word(each) for each in relation.split("|")]
        wanted = [parts.get(name) or parts.get(f"provided {name}") for name in names]
        found += [each.component for each in wanted if each][:1]
    return found


def main(image: str, venv: str) -> None:
    """Print the bill of materials of the image that this runs in."""
    of_python, of_debian = dict(wheels(venv)), dict(debian())
    ours = of_python[PROJECT].component
    bom = Bom()
    bom.metadata.timestamp = datetime.fromisoformat(os.environ["CREATED"])
    bom.metadata.authors.add(OrganizationalContact(name=PROJECT))
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER,
        name=f"{PROJECT}:{image}",
        version=ours.version,
        bom_ref="image",
        supplier=OrganizationalEntity(name=PROJECT),
    )
    needed = set()
    for parts in (of_python, of_debian):
        for name, part in parts.items():
            if name.startswith("provided "):
                continue
            bom.components.add(part.component)
            depends = needed_by(part, parts)
            bom.register_dependency(part.component, depends)
            needed |= {each.bom_ref for each in depends if each is not part.component}
    # What no other part needs was asked for: the image depends on it, and on this project first of all.
    roots = [each for each in bom.components if each.bom_ref not in needed]
    bom.register_dependency(bom.metadata.component, roots)
    content = "\n".join(sorted(str(each.bom_ref) for each in bom.components))
    bom.serial_number = uuid5(NAMESPACE_URL, content)
    print(JsonV1Dot6(bom).output_as_string(indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
