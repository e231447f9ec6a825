"""YAML that users write, with a limit to what it becomes: an alias takes two bytes and may stand for the whole file."""

from __future__ import annotations

import yaml

PRESET_BYTES = 1 << 17  # of a preset, also once its aliases are written out; the largest of the template has 16 kB
ANSWERS_BYTES = 1 << 18  # of an answers file, which may hold a preset


class Bounded:
    """A mixin for YAML's loaders: refuses a document that is too large before anything is made of it."""

    limit = PRESET_BYTES

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        sizes: dict[int, int] = {}
        if node is not None and _written_out(node, self.limit + 1, sizes) > self.limit:
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            large = next((key for key, value in pairs if sizes[id(value)] > self.limit), node)
            problem = f"its aliases expand to more than {self.limit >> 10} kB"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=large.start_mark)
        return node


class BoundedLoader(Bounded, yaml.SafeLoader):
    """`yaml.SafeLoader` for a preset."""


class BoundedText(Bounded, yaml.BaseLoader):
    """`yaml.BaseLoader`, for which every value is text, for an answers file."""

    limit = ANSWERS_BYTES


def _written_out(node: yaml.Node, endless: int, sizes: dict[int, int]) -> int:
    """Return how many bytes a node takes at least without aliases. Each is looked at once, however often it is named.

    One that holds itself counts as `endless`.
    """
    if id(node) not in sizes:
        sizes[id(node)] = endless
        if isinstance(node, yaml.MappingNode):
            size = sum(_written_out(each, endless, sizes) + 1 for pair in node.value for each in pair)
        elif isinstance(node, yaml.SequenceNode):
            size = sum(_written_out(each, endless, sizes) + 1 for each in node.value)
        else:
            size = len(node.value)
        sizes[id(node)] = size
    return sizes[id(node)]
