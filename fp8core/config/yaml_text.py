"""YAML of configurations: YAML 1.2's scalars, no key twice, bounded in size, and where each key was written."""

import re
from typing import Any

import yaml

from fp8core.errors import UserError


class Block(dict[str, Any]):
    """A mapping with the place where each of its keys was written."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, str] = {}

    def put(self, key: str, value: Any, place: str) -> None:
        self[key] = value
        self.places[key] = place

    def duplicate(self) -> "Block":
        twin = Block()
        for key, value in self.items():
            twin.put(key, value, self.places[key])
        return twin


class _Loader(yaml.SafeLoader):
    """The scalars of YAML 1.2, in decimal: `1e-4` is a number, `on` and `2024-01-01` are strings. No key twice.

    Levels are bounded where they are read: what comes next takes time that grows with their square.
    """

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        self._refuse_deeper(self.flow_level)
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        self._refuse_deeper(len(self.indents))
        return bool(super().add_indent(column))

    def _refuse_deeper(self, levels: int) -> None:
        if levels >= _DEEPEST:
            raise yaml.scanner.ScannerError(None, None, TOO_DEEP, self.get_mark())


_LARGEST_TREE = 20_000
_DEEPEST = 40
"""Values and levels of a file: many times those of the largest one shipped, and read within a second."""
TOO_DEEP = f"nested too deep; at most {_DEEPEST} levels are read"

# Another key may be the line of a file that is no configuration, as `root:...:` is.
SETTING = re.compile(r"[\w.-]{1,60}")
_YAML = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]{0,30})", list("-+0123456789")),
    "float": (
        r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan",
        list("-+.0123456789"),
    ),
}
_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    tag: yaml.SafeLoader.yaml_constructors[tag]
    for tag in (*(f"{_YAML}{kind}" for kind in (*_SCALARS, "str", "seq")), None)
}
for _kind, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_YAML}{_kind}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_block(loader: _Loader, node: yaml.MappingNode) -> Block:
    block = Block()
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            problem = "a key is not a string; quote it"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in block:
            problem = f"{f'key {key}' if SETTING.fullmatch(key) else 'a key'} is already given at {block.places[key]}"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        block.put(key, loader.construct_object(value_node, deep=True), f"{loader.name}:{line}")
    return block


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    try:
        # JSON escapes a character beyond the first plane as two halves, which PyYAML leaves apart.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return text  # Refused by its key (`config.load`).


_Loader.add_constructor(f"{_YAML}map", _construct_block)
_Loader.add_constructor(f"{_YAML}str", _construct_text)


def parse_yaml(text: str, source: str) -> Any:
    """The content of a file, mappings with the place of each key.

    Raises:
        UserError: with `source`, the line and the column. Nothing of the text is in the message: a parameter of a
            deployment may name any file, and messages go to logs and databases.
    """
    try:
        return _content_of(text, source)
    except RecursionError as error:  # Aliases of aliases.
        raise UserError(f"{source}: {TOO_DEEP}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        # PyYAML calls it a character.
        tab = mark is not None and text[mark.index : mark.index + 1] == "\t"
        problem = "a tab; YAML is indented by spaces" if tab else _unquoted(error.problem or "not valid YAML")
        raise UserError(f"{place}: {problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}") from None


_PLAIN = {
    "expected <block end>": "this line does not go on with the one above; check indentation and quotes",
    "mapping values are not allowed here": "a second `: ` in one value, or wrong indentation; quote a value with `: `",
    "could not find expected ':'": "a key without `: `",
    "that cannot start any token": "a value cannot begin with this character; quote it",
    "unexpected end of stream": "it ends within a quoted value; close its quote",
    "expected the node content": "a value is missing",
    "expected alphabetic or numeric character": "an alias or anchor without a name; quote a value with * or &",
    "undefined alias": "a value that begins with * names an anchor, and there is none; quote it",
    "expected <document start>": "this line is outside of the mapping above; check its indentation",
}
"""Words of PyYAML's scanner and parser -> what a person can look for."""


def _unquoted(problem: str) -> str:
    """A problem of PyYAML's in plain words, without what it found in the text; what it expected stays."""
    problem = re.sub(r",? but (?:found|got) .*", "", problem)
    for known, plain in _PLAIN.items():
        if known in problem:
            return plain
    return re.sub(r"(alias|anchor|character|handle|tag) (['\"]).*\2", r"\1", problem)


def _content_of(text: str, source: str) -> Any:
    """The content of one document. Raises yaml.YAMLError, and RecursionError where it is nested too deep."""
    loader = _Loader(text)
    loader.name = source
    node = loader.get_single_node()
    if node is None:
        return None
    size, height = _extent(node, {})
    if size > _LARGEST_TREE:
        problem = f"it has {size:,} values, aliases followed; at most {_LARGEST_TREE:,} are read"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    if height > _DEEPEST:
        raise yaml.constructor.ConstructorError(None, None, TOO_DEEP, node.start_mark)
    return loader.construct_document(node)


def _extent(node: yaml.Node, known: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Number of values and of levels below and including a node; an alias stands for all that it names."""
    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if node not in known:
        known[node] = _LARGEST_TREE, 1  # While its children are counted: one that holds itself has no end.
        pairs = isinstance(node, yaml.MappingNode)
        children = [child for pair in node.value for child in pair] if pairs else node.value
        below = [_extent(child, known) for child in children]
        known[node] = 1 + sum(size for size, _ in below), 1 + max((height for _, height in below), default=0)
    return known[node]
