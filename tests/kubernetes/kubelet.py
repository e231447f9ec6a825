"""What kubelet makes of the arguments of a container."""

from __future__ import annotations

import re
from collections.abc import Mapping


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """$(NAME) is the variable, if there is one; $$ is $, and keeps what follows from being one.

    Source: kubernetes third_party/forked/golang/expansion/expand.go.
    """

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, word)
