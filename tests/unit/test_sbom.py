"""What is in the image is written down the same way each time, and nothing that went in is left out."""

import json
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "python 3.13.2\ndistro debian 13\ndeb libc6 2:2.41-12+deb13u1 amd64\ndeb tar 1.35+dfsg-3.1 amd64\n"
LONG = "Copyright\n" + 60 * "    and so on\n"


def wheel(directory, name, version, *fields):
    path = directory / f"{name}-{version}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *fields]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n\nIts text.\nName: no\n")
    return path


def sbom(*wheels, system=SYSTEM):
    command = [sys.executable, ROOT / "scripts/sbom.py", "kmq", "0.1.0", *wheels]
    return subprocess.run(command, input=system, capture_output=True, text=True, check=True).stdout


def test_every_wheel_and_package_is_named_with_version_licence_and_hash(tmp_path):
    expressed = wheel(tmp_path, "Posix_IPC", "1.3", "License-Expression: BSD-3-Clause", "License: something else")
    named = wheel(tmp_path, "grpcio", "1.85", "License: Apache-2.0")
    lengthy = LONG.replace("\n", "\n        ")
    classified = wheel(
        tmp_path, "rich", "15", f"License: {lengthy}", "Classifier: License :: OSI Approved :: MIT License"
    )
    found = json.loads(sbom(expressed, named, classified))
    assert (found["bomFormat"], found["metadata"]["component"]["version"]) == ("CycloneDX", "0.1.0")
    components = {each["purl"]: each for each in found["components"]}
    assert list(components) == [
        "pkg:deb/debian/libc6@2:2.41-12%2Bdeb13u1?arch=amd64&distro=debian-13",
        "pkg:deb/debian/tar@1.35%2Bdfsg-3.1?arch=amd64&distro=debian-13",
        "pkg:generic/cpython@3.13.2",
        "pkg:pypi/grpcio@1.85",
        "pkg:pypi/posix-ipc@1.3",
        "pkg:pypi/rich@15",
    ]
    licences = [components[f"pkg:pypi/{each}"]["licenses"] for each in ("posix-ipc@1.3", "grpcio@1.85", "rich@15")]
    assert licences == [
        [{"expression": "BSD-3-Clause"}],
        [{"license": {"name": "Apache-2.0"}}],
        [{"license": {"name": "MIT License"}}],
    ]
    digest = sha256(named.read_bytes()).hexdigest()
    assert components["pkg:pypi/grpcio@1.85"]["hashes"] == [{"alg": "SHA-256", "content": digest}]


def test_the_same_input_in_any_order_gives_the_same_bytes(tmp_path):
    wheels = [wheel(tmp_path, name, "1") for name in ("a", "b", "c")]
    lines = SYSTEM.splitlines(keepends=True)
    first = sbom(*wheels)
    assert sbom(*reversed(wheels), system="".join([*lines[:2], *reversed(lines[2:])])) == first
    assert sbom(*wheels[1:]) != first
