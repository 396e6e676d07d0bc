"""Text to token ids and back: a Hugging Face tokenizer folder (tokenizer.json, tokenizer_config.json, chat template).

Wraps the `tokenizers` library. Prompts must not depend on the day a run is replayed, so `strftime_now` is not offered
to chat templates. Those that test whether it is defined (Llama 3.2) then print their fixed date.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from fp8core.errors import UserError
from fp8core.user_files import read_json_object, read_text

PiecesOf = Callable[[str], list[str]]
"""Cuts a text."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the text of an assistant; it changes nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _NoTools(Undefined):
    """No tools: transformers gives templates None, and others leave them undefined. Templates test for either."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _NoTools)

    __hash__ = Undefined.__hash__


class Tokenizer:
    """A tokenizer with the ids that end and fill sequences, and its chat template.

    Attributes:
        eos_ids: Tokens that end a completion.
        end_id: The one of them that a demonstration ends with.
        pad_id: Token that fills a batch; the smallest end-of-sequence id when the checkpoint names none.
        vocab_size: One more than the largest id.
        sampling: What generation_config.json says besides token ids, such as temperature and top_p.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        eos_ids: frozenset[int],
        template: str | None,
        where: str,
        sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Wrap a backend; `Tokenizer.load` and `character_tokenizer` are the usual ways in.

        Args:
            backend: The `tokenizers` object; its truncation and padding are switched off.
            eos_ids: Tokens that end a completion, besides `eos_token` of the configuration.
            sampling: Sampling defaults that a saved checkpoint gets again.

        Raises:
            UserError: no token ends a sequence, a special token is not in the vocabulary, or the template is malformed.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._config, self._where = backend, dict(config), where
        self.sampling = dict(sampling)
        self._special = {key: text for key in config if key.endswith("_token") and (text := _token_text(config[key]))}
        eos_id, pad_id = self._special_id("eos_token"), self._special_id("pad_token")
        self.bos_id = self._special_id("bos_token")
        self.eos_ids = eos_ids | ({eos_id} if eos_id is not None else set())
        if not self.eos_ids:
            raise UserError(f"{where}: no token ends a sequence; set eos_token in tokenizer_config.json")
        self.end_id = eos_id if eos_id is not None else min(self.eos_ids)
        self.pad_id = pad_id if pad_id is not None else min(self.eos_ids)
        if not backend.get_vocab_size():
            raise UserError(f"{where}: tokenizer.json has an empty vocabulary")
        self.vocab_size = max(backend.get_vocab().values()) + 1
        added = backend.get_added_tokens_decoder()
        self._control = {i for i, token in added.items() if token.content.strip()}
        texts = {text for key, text in self._special.items() if key != "unk_token" and len(text) > 1}
        named = {i for text in texts if (i := backend.token_to_id(text)) is not None}
        self._control |= named
        # Marks of turns. An assistant writes tokens of thoughts and calls itself.
        self._turns = self._control & (named | self.eos_ids | {i for i, token in added.items() if token.special})
        self._template_text = template
        self._template = None if template is None else _compile(template, where)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a checkpoint folder.

        A completion ends at `eos_token` and, as in transformers and vLLM, at the ids of generation_config.json or,
        without one, of config.json.

        Raises:
            UserError: naming the file that is missing, malformed or incomplete.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; if the folder has another tokenizer format, convert it: "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) in transformers"
            )
        backend = _backend_of(path)
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        config |= _mapped_tokens(folder / "special_tokens_map.json", config)
        ends, sampling = _configured_eos(folder), _sampling_defaults(folder / "generation_config.json")
        return cls(backend, config, ends, _template_of(folder, config), str(folder), sampling)

    def difference(self, other: "Tokenizer") -> str | None:
        """The first token that has another id in `other`, or is in one of them alone; None for one vocabulary."""
        ours, theirs = self._backend.get_vocab(), other._backend.get_vocab()
        for token, index in sorted(ours.items(), key=lambda item: item[1]):
            if theirs.get(token) != index:
                return f"token {token!r} is {index} here and {theirs.get(token, 'not in the vocabulary')} there"
        more = sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__)
        return f"token {more[0]!r} is not in the vocabulary here and {theirs[more[0]]} there" if more else None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids; special tokens written out in the text are recognised.

        Args:
            add_special_tokens: Also add what tokenizer.json's post-processor adds, such as a first token. Leave it
                off for text from `render`: the template has written them.

        Raises:
            UserError: a character that the tokenizer has no token for.
        """
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        unknown = getattr(self._backend.model, "unk_token", None)
        if unknown is not None and unknown in encoding.tokens:
            start, end = encoding.offsets[encoding.tokens.index(unknown)]
            raise UserError(f"the tokenizer has no token for {text[start:end]!r} (character {start}) of {text!r:.80}")
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text, with special tokens or without; an id that has no token is shown as `<|id N|>`."""
        texts, begin = list[str](), 0
        for place in [*self.without_token(ids), len(ids)]:
            texts.append(str(self._backend.decode(list(ids[begin:place]), skip_special_tokens=not special)))
            texts += [f"<|id {i}|>" for i in ids[place : place + 1]]
            begin = place + 1
        return "".join(texts)

    def without_token(self, ids: Sequence[int]) -> list[int]:
        """Places of ids that have no token: a model's embeddings may be more than its tokens."""
        return [place for place, i in enumerate(ids) if i not in self._ids]

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_vocab().values())

    def untrusted_tokens(
        self, texts: Sequence[str], pieces_of: Callable[[PiecesOf], Sequence[str]], first: bool = False
    ) -> list[int]:
        """Token ids of a rendering around texts of others, none of which writes a control token.

        Args:
            texts: those of others.
            pieces_of: the rendering in pieces, by a function that cuts each of these texts.
            first: also add what tokenizer.json's post-processor adds.

        Raises:
            ValueError: as `plain_pieces`, or there is no token for a character.
        """
        tokens = self._encode_pieces(pieces_of(self.plain_pieces), first)
        if not any(map(self._may_join, texts)):
            return tokens
        # A text may end with the beginning of a control token, and the template go on with its end.
        apart = self._encode_pieces(pieces_of(self._apart), first)
        return tokens if self._controls(tokens) == self._controls(apart) else apart

    def _controls(self, tokens: Sequence[int]) -> list[int]:
        return [i for i in tokens if i in self._control]

    def _encode_pieces(self, pieces: Sequence[str], first: bool) -> list[int]:
        begin, *others = [piece for piece in pieces if piece] or [""]
        try:
            return self.encode(begin, first) + [i for piece in others for i in self.encode(piece)]
        except UserError as error:
            raise ValueError(str(error)) from error

    def _may_join(self, text: str) -> bool:
        """True if a control token may begin before the text or end after it."""
        normalizer, longest = self._backend.normalizer, self._longest_control
        begins, ends = self._control_parts
        for each in {text, text if normalizer is None else normalizer.normalize_str(text)}:
            lengths = range(1, min(longest, len(each) + 1))
            if any(each[-count:] in begins or each[:count] in ends for count in lengths):
                return True
            if 0 < len(each) < longest and any(each in name for name in self._control_texts):
                return True
        return False

    def _apart(self, text: str) -> list[str]:
        """As `plain_pieces`, with the characters of both ends one by one."""
        count = self._longest_control
        middle = self.plain_pieces(text[count:-count]) if len(text) > 2 * count else []
        pieces = [*text[:count], *middle, *text[max(count, len(text) - count) :]]
        # Templates may strip whitespace, so no cut hides any from them.
        return [""] * (not text[:1].isspace()) + pieces + [""] * (not text[-1:].isspace())

    @cached_property
    def _control_parts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Beginnings and ends of control tokens."""
        cuts = [(name[:i], name[i:]) for name in self._control_texts for i in range(1, len(name))]
        return frozenset(begin for begin, _ in cuts), frozenset(end for _, end in cuts)

    @cached_property
    def _longest_control(self) -> int:
        return max(map(len, self._control_texts), default=0)

    def plain_pieces(self, text: str) -> list[str]:
        """The text cut inside whatever `encode` would take for a control token: each piece encodes as plain text.

        Control tokens are those that were added to the vocabulary, special or not, but for mere whitespace.

        Raises:
            ValueError: a control token of one character, which cannot be cut, or text that has no bytes.
        """
        return self._cut(text, self._control)

    def assistant_pieces(self, text: str) -> list[str]:
        """As `plain_pieces` for an assistant's message, where tokens that are not special stand: `<think>`."""
        return self._cut(text, self._turns)

    def _cut(self, text: str, control: Set[int]) -> list[str]:
        pieces, rest = list[str](), [text]
        while rest:
            part = rest.pop()
            part.encode()
            encoding = self._backend.encode(part, add_special_tokens=False)
            found = [span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in control]
            if not found:
                pieces.append(part)
                continue
            if any(end - start < 2 for start, end in found):
                raise ValueError(f"a control token is in {part!r:.80}")
            cuts = [0, *(start + 1 for start, _ in found), len(part)]
            rest += [part[start:end] for start, end in pairwise(cuts)][::-1]
        return pieces

    def least_tokens(self, text: str) -> int:
        """Fewest tokens that the text can have, of which none is made for that.

        It is 0 where that is unknown, or where `encode` or `plain_pieces` may refuse the text.
        """
        if self._backend.normalizer is not None and not (
            _state(self._backend.normalizer)["type"] == "NFC" and unicodedata.is_normalized("NFC", text)
        ):
            return 0
        known, widest = self._known_and_widest
        found = {*text}
        if not widest or (known is not None and not found <= known) or not found.isdisjoint(self._control_texts):
            return 0
        try:
            return -(-len(text.encode()) // widest)
        except UnicodeEncodeError:
            return 0

    def rough_pieces(self, text: str) -> list[str]:
        """About what `plain_pieces` gives, by the names of control tokens: nothing is encoded for that."""
        names = sorted(self._control_texts, key=len, reverse=True)
        found = re.finditer("|".join(map(re.escape, names)), text) if names else ()
        return [text[start:end] for start, end in pairwise([0, *(match.start() + 1 for match in found), len(text)])]

    @cached_property
    def _control_texts(self) -> frozenset[str]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(added[i].content if i in added else self._backend.id_to_token(i) or "" for i in self._control)

    @cached_property
    def _known_and_widest(self) -> tuple[frozenset[str] | None, int]:
        """Characters that have tokens (None: all), and bytes of the longest text of one token; 0 where any text may be.

        Told of a byte-level BPE and of `character_tokenizer`: with others, characters may be dropped or run together.
        """
        added = self._backend.get_added_tokens_decoder()
        if any(token.lstrip or token.rstrip for token in added.values()):
            return None, 0
        vocabulary = [text for text, i in self._backend.get_vocab().items() if i not in added]
        longest = max((len(token.content.encode()) for token in added.values()), default=0)
        before = None if self._backend.pre_tokenizer is None else _state(self._backend.pre_tokenizer)
        if before == _state(_CHARACTERS) and isinstance(self._backend.model, models.WordLevel):
            return frozenset(text for text in vocabulary if len(text) == 1), max(4, longest)
        steps = [] if before is None else before.get("pretokenizers", [before])
        parts = [(step["type"], step.get("behavior", "Removed")) for step in steps]
        keeps = all(kind in ("ByteLevel", "Digits") or behavior != "Removed" for kind, behavior in parts)
        of_bytes = isinstance(self._backend.model, models.BPE) and any(kind == "ByteLevel" for kind, _ in parts)
        unknown = getattr(self._backend.model, "unk_token", None)
        if not (keeps and of_bytes) or unknown or not {*pre_tokenizers.ByteLevel.alphabet()} <= {*vocabulary}:
            return None, 0
        # Each of its characters stands for a byte.
        return None, max(longest, *map(len, vocabulary))

    @property
    def may_lack_characters(self) -> bool:
        """True if `encode` may refuse a text: there is a token for what is unknown, and bytes have none."""
        model = self._backend.model
        return getattr(model, "unk_token", None) is not None and not getattr(model, "byte_fallback", False)

    @property
    def where(self) -> str:
        """Where it and its chat template come from, for messages."""
        return self._where

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def template(self) -> str:
        """The chat template (jinja); empty without one."""
        return self._template_text or ""

    def chat_prompt(self, question: str, before: Sequence[Mapping[str, str]] = ()) -> str | None:
        """`render` of a user's message after these; None without a template."""
        return self.render([*before, {"role": "user", "content": question}]) if self.has_template else None

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The chat template around messages, each with `role` and `content`.

        `tools`: that the assistant may call, as JSON schemas of functions. `add_generation_prompt`: end where the
        assistant speaks. Raises UserError: the template refuses the messages or fails.
        """
        assert self._template is not None, "without a chat template nothing is rendered"
        try:
            return self._template.render(
                messages=[*messages],
                tools=[*tools] or _NoTools(name="tools"),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special, **arguments},
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise UserError(f"{self._where}: the chat template failed: {_one_line(error)}") from error

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja."""
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        config = json.dumps(self._config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
        if self._template_text is not None:
            (folder / "chat_template.jinja").write_text(self._template_text, encoding="utf-8")

    def _special_id(self, key: str) -> int | None:
        text = self._special.get(key)
        if text is None:
            return None
        found = self._backend.token_to_id(text)
        if found is None:
            raise UserError(f"{self._where}: {key} {text!r} is not in the vocabulary")
        return found


_CHARACTERS = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def character_tokenizer(alphabet: str, vocab_size: int, eos: str) -> Tokenizer:
    """One token a character: `<pad>` 0, `eos` 1, `<unk>` 2, then the alphabet in order, then `<unused0>`...

    Args:
        alphabet: The characters, each once; `eos` may be among them.
    """
    names = ["<pad>", eos, "<unk>", *(character for character in alphabet if character != eos)]
    assert len(set(names)) == len(names), f"repeated in alphabet {alphabet!r} or special tokens"
    assert len(names) <= vocab_size, f"{len(names)} tokens do not fit in vocab_size={vocab_size}"
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = _CHARACTERS
    backend.decoder = decoders.Fuse()
    # `<unk>` stays an ordinary token: one that a model samples must show in the text, not vanish from it.
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken(eos, special=True)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(backend, config, frozenset(), None, "character tokenizer")


def _backend_of(path: Path) -> tokenizers.Tokenizer:
    read_json_object(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{path}: not a tokenizer: {error}") from error


def _configured_eos(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = read_json_object(path).get("eos_token_id") if path.is_file() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise UserError(f"{path}: eos_token_id: found {json.dumps(found)}, expected a token id or a list of them")
        return frozenset(ids)
    return frozenset()


def _sampling_defaults(path: Path) -> dict[str, Any]:
    """The content of a generation_config.json without the token ids, which the tokenizer names."""
    content = read_json_object(path) if path.is_file() else {}
    return {key: value for key, value in content.items() if key not in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _mapped_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that older folders name in special_tokens_map.json; they replace those of the configuration.

    As in transformers, a configuration that lists its added tokens names them itself.
    """
    if "added_tokens_decoder" in config or not path.is_file():
        return {}
    return {key: entry for key, entry in read_json_object(path).items() if key.endswith("_token")}


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template; a file of its own wins over the configuration, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template: expected text")
    return found


def _token_text(entry: object) -> str | None:
    """A special token of tokenizer_config.json: text, or an object with its content; flags are no tokens."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


def _compile(template: str, where: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.tests["none"] = lambda value: value is None or isinstance(value, _NoTools)
    environment.globals["raise_exception"] = _raise_template_error
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise UserError(f"{where}: malformed chat template: {_one_line(error)}") from error


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """That of transformers: jinja's own escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)
