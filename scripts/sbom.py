"""The content of an image as CycloneDX JSON: its wheels with licence and sha256, its Debian packages, its Python.

    scripts/sbom.py NAME VERSION WHEELS... <SYSTEM >NAME.cdx.json

SYSTEM is the image's answer to `scripts/image`: `python <version>`, `distro <name> <version>`, and for each package
`deb <name> <version> <architecture>`. The same input gives the same bytes. The jars inside pyspark are not listed one
by one.
"""

import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]
_LONGEST_NAME = 80  # of a licence: in some wheels the field holds its whole text


def of_wheel(path: Path) -> Component:
    with zipfile.ZipFile(path) as wheel:
        (name,) = (each for each in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', metadata['Name']).lower()}@{metadata['Version']}"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return _component(purl, metadata["Name"], metadata["Version"]) | {
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "licenses": licences(metadata),
    }


def licences(metadata: Message) -> list[dict[str, Any]]:
    """Return the licences: from the expression, else from the field if it is a name, else from the classifiers."""
    if expression := metadata["License-Expression"]:
        return [{"expression": expression}]
    name = (metadata["License"] or "").strip()
    if name and "\n" not in name and len(name) <= _LONGEST_NAME:
        return [{"license": {"name": name}}]
    classifiers = metadata.get_all("Classifier", [])
    names = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")]
    return [{"license": {"name": each}} for each in sorted(names)]


def of_system(lines: list[str]) -> Iterator[Component]:
    """Yield the packages and the Python that the image has named."""
    distro = next((line.split()[1:] for line in lines if line.startswith("distro ")), ["debian", ""])
    for kind, *fields in map(str.split, lines):
        if kind == "deb":
            name, version, architecture = fields
            place = f"{quote(distro[0])}/{quote(name)}@{quote(version, safe=':~')}"
            yield _component(f"pkg:deb/{place}?arch={architecture}&distro={'-'.join(distro)}", name, version)
        elif kind == "python":
            yield _component(f"pkg:generic/cpython@{fields[0]}", "cpython", fields[0])


def _component(purl: str, name: str, version: str) -> Component:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(name: str, version: str, components: list[Component]) -> dict[str, Any]:
    components = sorted(components, key=lambda each: str(each["purl"]))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([name, version, components]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": components,
    }


def main(name: str, version: str, *wheels: str) -> None:
    system = [line for line in sys.stdin.read().splitlines() if line]
    components = [*(of_wheel(Path(wheel)) for wheel in wheels), *of_system(system)]
    json.dump(document(name, version, components), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
