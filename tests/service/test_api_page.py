"""The page of the API: all requests and bodies, and nothing that a browser would load or execute."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.service.fake_run import FakeRun, error_message

from dora.service.api_page import render_page

TEXT = "a < b & `code <i>`"
API = {
    "info": {"title": "A <b>", "description": TEXT},
    "paths": {
        "/x/{name}": {
            "get": {
                "description": TEXT,
                "parameters": [
                    {"name": "name", "in": "path", "schema": {"type": "string", "pattern": "^<$"}}
                ],
                "responses": {"200": {"content": {"application/json": {"schema": {"$ref": "#/x/Y"}}}}},
            }
        }
    },
    "components": {"schemas": {"Y": {"properties": {"<z>": {"anyOf": [{"type": "null"}, {"const": "<"}]}}}}},
}


class Page(HTMLParser):
    """The elements and attributes of a page; every element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    return FakeRun(tmp_path_factory.mktemp("page"))


def test_the_page_has_every_request_and_every_body(run: FakeRun) -> None:
    api, page = run.call("GET", "/openapi.json").json(), Page(run.call("GET", "/docs").text)
    for path, methods in api["paths"].items():
        assert all(f"{method.upper()} {path}" in page.text for method in methods)
    ids = {value for name, value in page.attributes if name == "id"}
    links = {str(value)[1:] for name, value in page.attributes if name == "href" and value != "data:,"}
    assert links <= ids == api["components"]["schemas"].keys()
    for schema in api["components"]["schemas"].values():
        assert all(name in page.text for name in schema.get("properties", ()))


def test_the_page_loads_and_executes_nothing(run: FakeRun) -> None:
    response = run.call("GET", "/docs")
    page = Page(response.text)
    assert page.open == []
    assert not page.tags & {"script", "iframe", "img", "form", "object"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style")]
    assert not re.search(r"https?://|url\(|@import", response.text)
    assert response.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert error_message(run.call("POST", "/docs"), 405) == "the method is not supported here; use GET"


def test_texts_of_the_description_are_escaped() -> None:
    page = Page(render_page(API))
    assert not page.tags & {"b", "i", "z"}
    assert page.text.count("a < b & code <i>") == 2
    for text in ("A <b> API", "string, matches ^<$", "<z>", 'null or "<"'):
        assert text in page.text


def test_the_page_has_no_data_of_the_run(run: FakeRun, tmp_path: Path) -> None:
    other = FakeRun(tmp_path, service__agents="true", data__path="gcd")
    assert run.call("GET", "/docs").text == other.call("GET", "/docs").text
