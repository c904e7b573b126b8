"""Count what a reader opens to follow an entry point: every file of the package that its imports lead to.

    python tools/reading_path.py --rooms cli,experiments torch_dcl.cli.run torch_dcl.experiments.recipes.table1

Imports inside functions count, those for type checkers alone do not. With ``--rooms`` imports that lead out of these
rooms are not followed. Without an entry point it prints files and lines of every room; ``--without`` leaves out files
and folders by name, such as those of recipes that came later.
"""

import argparse
import ast
from collections.abc import Container, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "torch_dcl"


def file_of(module: str) -> Path | None:
    """The file of a module of the package, or None if there is no such module."""
    place = PACKAGE.parent.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(path: Path) -> Iterator[Path]:
    """The files of the package that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("torch_dcl"):
                # A name out of a module leads to that module, a module out of a package to itself.
                path_of = file_of(name) or file_of(name.rpartition(".")[0])
                if path_of is not None:
                    yield path_of


def reading_path(*modules: str, rooms: Container[str] | None = None) -> set[Path]:
    """All files that some modules lead to, these included; with ``rooms``, without leaving them."""
    opened: set[Path] = set()
    left = [path for module in modules if (path := file_of(module)) is not None]
    while left:
        path = left.pop()
        if path not in opened and (rooms is None or room_of(path) in rooms):
            opened.add(path)
            left += imported(path)
    return opened


def room_of(path: Path) -> str:
    """The room that a file stands in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def names_of(path: Path) -> set[str]:
    """The names of a file and of the folders that it stands in, inside of the package."""
    return set(path.relative_to(PACKAGE).with_suffix("").parts)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="entry points, such as torch_dcl.cli.run")
    parser.add_argument("--rooms", help="stay in these rooms, such as cli,experiments")
    parser.add_argument("--without", default="", help="leave out files and folders of these names: deep,imagenet")
    asked = parser.parse_args()
    for module in asked.modules:
        if file_of(module) is None:
            parser.error(f"there is no module {module!r} in {PACKAGE}")
    given = set(asked.rooms.split(",")) if asked.rooms else None
    paths = reading_path(*asked.modules, rooms=given) if asked.modules else set(PACKAGE.rglob("*.py"))
    rooms = given or {room_of(path) for path in paths}
    left_out = set(filter(None, asked.without.split(",")))
    kept = sorted(path for path in paths if room_of(path) in rooms and not left_out & names_of(path))
    if asked.modules:
        for path in kept:
            print(path.relative_to(PACKAGE))
    for room in sorted(rooms):
        files = [path for path in kept if room_of(path) == room]
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
        print(f"{room:14} {len(files):3} files {lines:6,} lines")
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in kept)
    print(f"{'together':14} {len(kept):3} files {lines:6,} lines")


if __name__ == "__main__":
    main()
