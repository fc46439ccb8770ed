"""Prints the dependencies that pyproject.toml names, those of an extra included: `dependencies.py EXTRA`.

pip can't install a project's dependencies without building the project. `make` fetches them while something else compiles.
"""

from __future__ import annotations

import pathlib
import re
import sys
import tomllib


def dependencies(extra: str) -> list[str]:
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    pending = [extra]
    while pending:
        for requirement in project["optional-dependencies"][pending.pop()]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
            if own:
                pending += own[1].split(",")
            else:
                found[requirement] = None
    return list(found)


if __name__ == "__main__":
    print("\n".join(dependencies(sys.argv[1])))
