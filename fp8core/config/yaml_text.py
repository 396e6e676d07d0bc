"""YAML of configurations: YAML 1.2's scalars, no key twice, bounded in size, and where each key was written.

Where a setting holds text, `3.10`, `010` and `true` are these characters. Where it may be unset, `null` and `~` are no
value. Numbers are decimal: `80`, `1_000`, `-2`, `.5`, `1e-4`.
"""

import re
from contextlib import suppress
from typing import Any

import yaml

from fp8core.config.schema import Place
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


class _ValueLoader(_Loader):
    """Of a value that is given alone, in which no `#` begins a comment: the scanner sees another character there."""

    def peek(self, index: int = 0) -> str:
        character = str(super().peek(index))
        return "." if character == "#" else character


_LARGEST_TREE = 20_000
_DEEPEST = 40
"""Values and levels of a file: many times those of the largest one shipped, and read within a second."""
TOO_DEEP = f"nested too deep; at most {_DEEPEST} levels are read"

# Another key may be the line of a file that is no configuration, as `root:...:` is.
SETTING = re.compile(r"[\w.-]{1,60}")
_YAML = "tag:yaml.org,2002:"
_NULL, _TEXT = f"{_YAML}null", f"{_YAML}str"
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9](?:_?[0-9]){0,30})", list("-+0123456789")),
    "float": (
        r"[-+]?(?:(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan",
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
_Loader.add_constructor(_TEXT, _construct_text)


def parse_yaml(text: str, source: str, place: Place | None = None) -> Any:
    """The content of a file, mappings with the place of each key; `place`: what it may hold.

    Raises:
        UserError: with `source`, the line and the column. Nothing of the text is in the message: a parameter of a
            deployment may name any file, and messages go to logs and databases.
    """
    return _parsed(_Loader, text, source, place)


def parse_value(text: str, source: str, place: Place | None) -> Any:
    """A value that is given alone, for a place or for an unknown one (None); it has no comments.

    Where text is wanted it is the text as typed, unless quotes enclose the whole. Raises UserError, as `parse_yaml`.
    """
    if place is not None and not place.is_text:
        return _parsed(_ValueLoader, text, source, place)
    typed = text.strip()
    if place is not None and place.is_nullable and re.fullmatch(_SCALARS["null"][0], typed):
        return None
    # Line breaks between quotes are kept, where YAML makes spaces of them.
    if re.fullmatch(r"'(?:[^']|'')*'", typed, re.DOTALL):
        return typed[1:-1].replace("''", "'")
    if re.fullmatch(r'"(?:[^"\\]|\\.)*"', typed, re.DOTALL):
        with suppress(yaml.YAMLError):
            return _content_of(_Loader, typed.replace("\n", "\\n"), source, None)
    return text


def _parsed(kind: type[_Loader], text: str, source: str, place: Place | None) -> Any:
    try:
        return _content_of(kind, text, source, place)
    except RecursionError as error:  # Aliases of aliases.
        raise UserError(f"{source}: {TOO_DEEP}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if kind is _Loader and mark and (cut := [*_OPEN_LIST.finditer(text, 0, mark.index)]):
            raise UserError(f"{source}:{text.count(chr(10), 0, cut[-1].start()) + 1}: {_CUT}") from None
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        # PyYAML calls it a character.
        tab = mark is not None and text[mark.index : mark.index + 1] == "\t"
        problem = "a tab; YAML is indented by spaces" if tab else _unquoted(error.problem or "not valid YAML")
        raise UserError(f"{where}: {problem}") from None
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


def _content_of(kind: type[_Loader], text: str, source: str, place: Place | None) -> Any:
    """The content of one document. Raises yaml.YAMLError, and RecursionError where it is nested too deep."""
    loader = kind(text)
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
    return loader.construct_document(_placed(node, place, text if kind is _Loader else None, None))


_CUT = "a `#` begins a comment and cuts this text; quote the text, or give the comment a line of its own"
_BEHIND = re.compile(r"(?:[ \t]+|(?:[ \t]*\r?\n)+(?P<indent> *))(?P<comment>#.*)")
_INSTEAD = re.compile(r"[ \t]*(?P<comment>#\S.*)")
_CUT_ITEM = re.compile(r"[\[,][ \t]*#\S")
_OPEN_LIST = re.compile(r"\[([^\]\n\"'#]*,)?[ \t]*#\S")
"""Instead of a value; one that begins with a space stands behind none, and is a comment."""


def _placed(node: yaml.Node, place: Place | None, text: str | None, column: int | None) -> yaml.Node:
    """A node with plain scalars as the characters that they are, where text is wanted.

    Args:
        node: of the content of a place.
        place: None: an unknown one.
        text: of the whole file; None has no comments.
        column: of the key or item in front of it; None: between brackets.

    Raises:
        yaml.constructor.ConstructorError: a comment cuts text.
    """
    if place is None:
        return node
    if isinstance(node, yaml.MappingNode):
        node.value = [
            (key, _placed(value, place.at(str(key.value)), text, None if node.flow_style else key.start_mark.column))
            for key, value in node.value
        ]
        return node
    if isinstance(node, yaml.SequenceNode):
        item = place.item()
        if text is not None and item is not None and item.is_text and node.flow_style:
            _refuse_cut_items(node, text)
        node.value = [
            _placed(each, item, text, None if node.flow_style else each.start_mark.column) for each in node.value
        ]
        return node
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or not (place.is_text or place.is_open):
        return node
    unset = node.tag == _NULL and (place.is_nullable or not node.value)
    if text is not None and (node.tag == _TEXT or (place.is_text and not (unset and node.value))):
        _refuse_cut(node, place, text, column)
    if place.is_open or unset:
        return node
    return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark)


def _refuse_cut(node: yaml.ScalarNode, place: Place, text: str, column: int | None) -> None:
    """A comment cuts plain text, unless the pattern of the setting does not allow the whole as text."""
    found = (_BEHIND if node.value else _INSTEAD).match(text, node.end_mark.index)
    if found is None or not place.fits(f"{node.value} {found['comment']}".lstrip()):
        return
    if node.value and not re.search(r"\s", node.value) and re.match(r"[ \t]{2,}# ", text[node.end_mark.index :]):
        return  # Behind one word, two spaces and a space after the `#` are how comments are written.
    indent = found.groupdict().get("indent")  # Of a comment on a line of its own; a text that goes on is indented.
    if indent is None or (column is not None and len(indent) > column):
        raise yaml.constructor.ConstructorError(None, None, _CUT, node.end_mark)


def _refuse_cut_items(node: yaml.SequenceNode, text: str) -> None:
    """Likewise for `[#x]` and `[a, #x]`; one that begins with a space is a comment."""
    end = node.start_mark.index
    for start, mark in [*((item.start_mark.index, item) for item in node.value), (node.end_mark.index, node)]:
        if _CUT_ITEM.search(text, end, start):
            raise yaml.constructor.ConstructorError(None, None, _CUT, node.start_mark)
        end = mark.end_mark.index


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
