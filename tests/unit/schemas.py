"""Schemas of Kubernetes: `validate` raises what a version of it would refuse in a document."""

from functools import cache
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

# Each file is parsed once: for every document anew it would be seconds of parsing megabytes of JSON.
utils.schema_contents = cache(utils.schema_contents)


def validate(document: dict[str, Any], version: str) -> None:
    """Raise ValidationError for an unknown field or a wrong type. `version`: such as "1.32"."""
    kubernetes_validate.validate(document, version, strict=True)
