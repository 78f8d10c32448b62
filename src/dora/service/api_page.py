"""The page `/docs`: all requests and responses of the service, from its OpenAPI description.

The page has no scripts and loads nothing, so it works without a network. It needs no auth token, because a
browser cannot send one, and it has no data of the run.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

Schema = Mapping[str, Any]

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LIMITS = {
    "minimum": "&ge; ",
    "exclusiveMinimum": "&gt; ",
    "maximum": "&le; ",
    "exclusiveMaximum": "&lt; ",
    "minLength": "length &ge; ",
    "maxLength": "length &le; ",
    "minItems": "at least ",
    "maxItems": "at most ",
    "pattern": "matches ",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .875em; overflow-wrap: anywhere; }
h3 { margin: 2rem 0 0; font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
td { vertical-align: top; padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid #8884; }
"""


async def get_page(request: Request) -> HTMLResponse:
    """The page; it is the same for all runs."""
    return HTMLResponse(render_page(request.app.openapi()), headers=HEADERS)


def render_page(api: Schema) -> str:
    """One HTML page for an OpenAPI document."""
    operations = [
        _operation(method, path, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [_schema_section(name, schema) for name, schema in api["components"]["schemas"].items()]
    title = html.escape(api["info"]["title"])
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{title} API</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title} API</h1>",
            f"<p>{_text(api['info']['description'])}</p>",
            "<p>All requests but <code>/health</code> and this page need the header "
            "<code>Authorization: Bearer TOKEN</code>. The token is in the file <code>service.json</code> in "
            "the folder of the run. <code>/openapi.json</code> is this description for programs.</p>",
            "<h2>Requests</h2>",
            *operations,
            "<h2>Bodies</h2>",
            *schemas,
            "</body>\n</html>\n",
        ]
    )


def _operation(method: str, path: str, operation: Schema) -> str:
    """A request: its parameters, its body and its response."""
    rows = [
        (_code(each["name"]), each["in"], _type(each["schema"]), _note(each, each["schema"]))
        for each in operation.get("parameters", ())
    ]
    rows += [("body", kind, _type(schema), "") for kind, schema in _content(operation.get("requestBody", {}))]
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            found = _content(response) or [("", {})]
            rows += [(f"response {status}", kind, _type(schema), "") for kind, schema in found]
    title = f"<h3>{_code(f'{method.upper()} {path}')}</h3>"
    return f"{title}\n<p>{_text(operation.get('description', ''))}</p>\n{_table(rows)}"


def _schema_section(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (_code(key), "required" if key in required else "", _type(field), _note(field))
        for key, field in schema.get("properties", {}).items()
    ]
    title = f'<h3 id="{html.escape(name)}">{_code(name)}</h3>'
    return f"{title}\n<p>{_text(schema.get('description', ''))}</p>\n{_table(rows)}"


def _content(holder: Schema) -> list[tuple[str, Schema]]:
    """Media type and schema of each form of a body."""
    return [(html.escape(kind), each.get("schema", {})) for kind, each in holder.get("content", {}).items()]


def _type(schema: Schema) -> str:
    """A schema in words; schemas with a name are links."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "const" in schema:
        return _code(json.dumps(schema["const"]))
    if "enum" in schema:
        return " or ".join(_code(json.dumps(value)) for value in schema["enum"])
    limits = [f"{word}{html.escape(str(schema[key]))}" for key, word in LIMITS.items() if key in schema]
    words = [html.escape(schema.get("type", "any")), *limits]
    return ", ".join(words) + (f" of {_type(schema['items'])}" if "items" in schema else "")


def _note(*holders: Schema) -> str:
    """The first description, and the default."""
    notes = [_text(each["description"]) for each in holders if "description" in each][:1]
    notes += [f"default {_code(json.dumps(each['default']))}" for each in holders if "default" in each]
    return "; ".join(notes)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    lines = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table>{lines}</table></div>' if cells else ""


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _text(markdown: str) -> str:
    """A description, whose only markup is code between backticks."""
    parts = html.escape(markdown).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))
