"""Descriptions of an API from its table of endpoints: OpenAPI for programs, Markdown for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from nsparq.http.api import JSON_TYPE, TEXT_TYPE, Api, Endpoint, Param

ERROR_SCHEMA = {
    "type": "object",
    "required": ["message"],
    "properties": {"message": {"type": "string", "description": "the code, for programs"}},
}


def openapi(api: Api) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in api.endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": api.title, "version": api.version},
        "components": {
            "schemas": {"Error": ERROR_SCHEMA},
            "securitySchemes": {"secret": {"type": "http", "scheme": "bearer"}},
        },
        # The secret is optional: it is needed only if the API is guarded.
        "security": [{}, {"secret": []}],
        "paths": paths,
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.group] if endpoint.group else [],
        "parameters": [_parameter(param) for param in endpoint.params],
        "responses": _responses(endpoint),
    }
    if endpoint.details:
        operation["description"] = endpoint.details
    _, brace, rest = endpoint.path.partition("{")
    if brace:
        schema = dict(endpoint.path_schema)
        name = rest.rstrip("}")
        operation["parameters"].append({"name": name, "in": "path", "required": True, "schema": schema})
    if endpoint.keeps_body:
        operation["requestBody"] = {
            "description": endpoint.body_help,
            "content": {endpoint.body_type: {"schema": dict(endpoint.body_schema or {})}},
            "required": endpoint.needs_body,
        }
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    path = endpoint.path.replace("{", "").replace("}", "").strip("/").replace("/", "_").replace(".", "_")
    return f"{endpoint.method.lower()}_{path}"


def _parameter(param: Param) -> dict[str, Any]:
    return {
        "name": param.name,
        "in": "query",
        "required": param.required,
        "description": param.help,
        "schema": dict(param.schema),
    }


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    success: dict[str, Any] = {"description": endpoint.success}
    if endpoint.success_type:
        success["content"] = {
            endpoint.success_type: {"schema": dict(endpoint.success_schema or {})},
            **{other: {} for other in endpoint.other_types},
        }
    if endpoint.success_headers:
        success["headers"] = {
            name: {"description": about, "required": True, "schema": {"type": "string"}}
            for name, about in endpoint.success_headers
        }
    responses: dict[str, Any] = {"200": success}
    by_status: dict[int, list[str]] = {}
    not_found = [(404, "NOT_FOUND")] if "{" in endpoint.path else []
    for status, code in (*endpoint.errors, *not_found, *_COMMON_ERRORS, (413, endpoint.too_big)):
        by_status.setdefault(status, []).append(code)
    for status, codes in sorted(by_status.items()):
        is_plain = all(" " in code for code in codes)
        content: dict[str, Any] = (
            {TEXT_TYPE: {"schema": {"type": "string"}}}
            if is_plain
            else {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/Error"}}, TEXT_TYPE: {}}
        )
        responses[str(status)] = {"description": ", ".join(dict.fromkeys(codes)), "content": content}
    return responses


_COMMON_ERRORS = (
    (400, "INVALID_REQUEST"),
    (401, "AUTH_REQUIRED"),
    (403, "UNAUTHORIZED"),
    (500, "INTERNAL_ERROR"),
    (503, "OVERLOADED"),
)
"""Errors of every endpoint."""


def markdown(api: Api, introduction: str) -> str:
    """The reference page."""
    lines = [introduction.strip(), ""]
    group = None
    for endpoint in api.endpoints:
        if endpoint.group != group:
            group = endpoint.group
            lines += [f"## {group}", ""]
        lines += [f"### {endpoint.method} {endpoint.path}", "", endpoint.summary, ""]
        if endpoint.details:
            lines += [endpoint.details, ""]
        if endpoint.params:
            lines += ["| parameter | |", "| --- | --- |"]
            for param in endpoint.params:
                needed = " (required)" if param.required else ""
                lines.append(f"| `{param.name}` | {param.help}{needed} |")
            lines.append("")
        if endpoint.keeps_body:
            lines += [f"Body: {endpoint.body_help}, {endpoint.max_body:,} bytes at most by default.", ""]
        types = " or ".join(f"`{name}`" for name in (endpoint.success_type, *endpoint.other_types) if name)
        lines += [f"200: {endpoint.success}" + (f" ({types})" if types else "")]
        if endpoint.success_headers:
            lines += ["", "| header | |", "| --- | --- |"]
            lines += [f"| `{name}` | {about} |" for name, about in endpoint.success_headers]
        if endpoint.errors:
            lines += [""]
            lines += [", ".join(f"{status} `{code}`" for status, code in endpoint.errors)]
        if endpoint.permission:
            lines += ["", f"Permission: `{endpoint.permission}`"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def print_description(module: str, api: Callable[[], Api], introduction: str) -> None:
    """The main of a module with an API: print the page or the document."""
    forms = {
        "--markdown": lambda: markdown(api(), introduction),
        "--openapi": lambda: json.dumps(openapi(api()), indent=2) + "\n",
    }
    if len(sys.argv) != 2 or sys.argv[1] not in forms:
        sys.exit(f"usage: python -m {module} {'|'.join(forms)}")
    sys.stdout.write(forms[sys.argv[1]]())
