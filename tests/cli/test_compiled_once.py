"""Jinja compiles equal strings once while copier renders, and as always before and after."""

from __future__ import annotations

from contextlib import suppress

from jinja2 import Environment
from jinja2.sandbox import SandboxedEnvironment

from ddp_scaffold.template.copier_calls import compiled_once


def test_equal_strings_of_one_environment_are_compiled_once() -> None:
    before, one, other = Environment.from_string, SandboxedEnvironment(), SandboxedEnvironment(trim_blocks=True)
    with suppress(KeyboardInterrupt), compiled_once():
        greeting = one.from_string("a {{ name }}")
        assert one.from_string("a {{ name }}") is greeting
        assert [greeting.render(name=name) for name in ("b", "c")] == ["a b", "a c"]
        text = "{% if name %}\n{{ name }}{% endif %}"
        assert (one.from_string(text).render(name="b"), other.from_string(text).render(name="b")) == ("\nb", "b")
        assert one.from_string("{{ more }}", {"more": 1}).render() == "1"
        assert one.from_string("{{ more }}").render() == "", "globals of one call are not those of another"
        raise KeyboardInterrupt
    assert Environment.from_string is before
