"""The JSON Schema of preset files, for editors that complete and check YAML while it is typed."""

from __future__ import annotations

from typing import Any

from .schema import Preset

NEVER_TAKEN_OVER = ("name", "title", "verified_on", "status")


def json_schema() -> dict[str, Any]:
    """Return the schema. A preset that extends another needs none of the fields that it can take over."""
    schema = Preset.model_json_schema()
    needed = [name for name in schema["required"] if name not in NEVER_TAKEN_OVER]
    extending = {"required": ["extends"], "properties": {"extends": {"type": "string"}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "required": list(NEVER_TAKEN_OVER),
        "anyOf": [extending, {"required": needed}],
    }
