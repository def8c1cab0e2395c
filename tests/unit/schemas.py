"""Schemas of Kubernetes: `validate` raises what a version of it would refuse in a document."""

from functools import cache
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

_WAIT = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h|d)$"}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
# A custom resource, so no schema of Kubernetes' own has it: the part of the Prometheus operator's that is used here.
PROMETHEUS_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PrometheusRule"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["groups"],
            "properties": {
                "groups": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "rules"],
                        "properties": {
                            "name": {"type": "string"},
                            "rules": {
                                "type": "array",
                                "minItems": 1,
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "required": ["alert", "expr"],
                                    "properties": {
                                        "alert": {"type": "string"},
                                        "expr": {"type": "string"},
                                        "for": _WAIT,
                                        "labels": _TEXTS,
                                        "annotations": _TEXTS,
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}

# Each file is parsed once, and the versions are listed once: for every document anew it would be seconds of CPU.
utils.schema_contents = cache(utils.schema_contents)
utils.all_versions = cache(utils.all_versions)


def validate(document: dict[str, Any], version: str) -> None:
    """Raise ValidationError for an unknown field or a wrong type. `version`: such as "1.32"."""
    kubernetes_validate.validate(document, version, strict=True)
