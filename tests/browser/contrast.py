"""Contrast as WCAG 2.2 defines it, in JavaScript for tests of pages."""

from __future__ import annotations

# contrast(element, property): of the element's colour with the first opaque background behind it.
FUNCTIONS = """
const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const light = (colour) => {
  const linear = (x) => x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4;
  return 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]);
};
const ground = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const [r, g, b, a = 1] = channels(getComputedStyle(e).backgroundColor);
    if (a === 1 && r !== undefined) return [r, g, b];
  }
  return [255, 255, 255];
};
const contrast = (element, property) => {
  const [r, g, b, a = 1] = channels(getComputedStyle(element)[property]), behind = ground(element);
  const opacity = a * Number(getComputedStyle(element).opacity);
  const seen = [r, g, b].map((x, i) => opacity * x + (1 - opacity) * behind[i]);
  const [low, high] = [light(seen), light(behind)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
"""


def script(body: str, parameter: str = "") -> str:
    """A function of the page with `contrast` in scope."""
    return f"({parameter}) => {{ {FUNCTIONS} {body} }}"
