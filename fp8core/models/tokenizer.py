"""Text to token ids and back: the tokenizer of a Hugging Face folder, with its chat template.

Prompts must not depend on the day that a run is replayed, so `strftime_now` gives templates a fixed date."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from fp8core.errors import UserError, first_line
from fp8core.user_files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_READING = ("is_local", "local_files_only")
# The date that Llama 3.2's template prints where it finds no clock.
_FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}\n"


class Tokenizer:
    """A tokenizer with the ids that end and fill sequences, and its chat template.

    Attributes:
        eos_ids: Tokens that end a completion.
        end_id: The one of them that a demonstration ends with.
        pad_id: Token that fills a batch; the smallest end-of-sequence id when the checkpoint names none.
        sampling: What generation_config.json says besides token ids, such as temperature and top_p.
        where: Where it and its chat template come from, for messages."""

    def __init__(
        self,
        fast: "PreTrainedTokenizerFast",
        eos_ids: frozenset[int],
        where: str,
        sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Raises UserError: no token ends a sequence."""
        self._fast = fast
        self._backend = fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.where = where
        self.sampling = dict(sampling)
        self.bos_id: int | None = fast.bos_token_id
        eos_id = fast.eos_token_id
        pad_id = fast.pad_token_id
        self.eos_ids = eos_ids | ({eos_id} if eos_id is not None else set())
        if not self.eos_ids:
            raise UserError(f"{where}: no token ends a sequence; set eos_token in {_CONFIG}")
        self.end_id: int = eos_id if eos_id is not None else min(self.eos_ids)
        self.pad_id: int = pad_id if pad_id is not None else min(self.eos_ids)
        self.vocab_size = max(self._backend.get_vocab().values(), default=0) + 1
        special_tokens = self._backend.get_added_tokens_decoder()
        self._control = {i for i, token in special_tokens.items() if token.content.strip()}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a checkpoint folder.

        A completion ends at `eos_token` and, as in transformers and vLLM, at the ids of generation_config.json or,
        without one, of config.json. Raises UserError: naming the file that is missing, malformed or incomplete."""
        path = folder / _TOKENIZER
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; if the folder has another tokenizer format, convert it: "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) in transformers"
            )
        for name in (_TOKENIZER, _CONFIG):
            if (folder / name).is_file():
                read_json_object(folder / name)
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.logging import set_verbosity_error

        # It would warn that it reads the folder of a tokenizer with a class of its own, whose tokens are the same.
        set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{path}: not a tokenizer: {first_line(error)}") from error
        return cls(fast, _configured_eos(folder), str(folder), _sampling_defaults(folder / "generation_config.json"))

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids; special tokens written out in the text are recognised.

        `add_special_tokens`: also what the post-processor adds; leave it off for text from `render`.
        Raises UserError: a character that the tokenizer has no token for."""
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        unknown = getattr(self._backend.model, "unk_token", None)
        if unknown is not None and unknown in encoding.tokens:
            start, end = encoding.offsets[encoding.tokens.index(unknown)]
            raise UserError(f"the tokenizer has no token for {text[start:end]!r} (character {start}) of {text!r:.80}")
        return list(encoding.ids)

    def encode_pieces(self, pieces: Sequence[str], first: bool = False) -> list[int]:
        """Token ids of texts side by side; `first`: also what the post-processor adds.
        Raises ValueError: a character that the tokenizer has no token for."""
        begin, *others = [piece for piece in pieces if piece] or [""]
        try:
            return self.encode(begin, first) + [i for piece in others for i in self.encode(piece)]
        except UserError as error:
            raise ValueError(str(error)) from error

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text, with special tokens or without; ids without a token, of padded embeddings, are left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=not special))

    def plain_pieces(self, text: str) -> list[str]:
        """The text cut inside whatever `encode` would take for a control token: each piece encodes as plain text.
        Raises ValueError: a control token of one character, which cannot be cut, or text that has no bytes."""
        pieces = list[str]()
        rest = [text]
        while rest:
            part = rest.pop()
            part.encode()
            encoding = self._backend.encode(part, add_special_tokens=False)
            spans = [span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in self._control]
            if not spans:
                pieces.append(part)
                continue
            if any(end - start < 2 for start, end in spans):
                raise ValueError(f"a control token is in {part!r:.80}")
            cuts = [0, *(start + 1 for start, _ in spans), len(part)]
            rest += [part[start:end] for start, end in pairwise(cuts)][::-1]
        return pieces

    @property
    def has_template(self) -> bool:
        return self._fast.chat_template is not None

    @cached_property
    def template(self) -> str:
        return self._fast.get_chat_template() if self.has_template else ""

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The chat template around messages, each with `role` and `content`.

        `tools`: JSON schemas of functions. `add_generation_prompt`: end where the assistant speaks.
        Raises UserError: the template refuses the messages or fails."""
        assert self.has_template, "without a chat template nothing is rendered"
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=(_FIXED_DATE if "strftime_now" in self.template else "") + self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **arguments,
            )
        except Exception as error:  # a template is a program of others, and may raise anything
            raise UserError(f"{self.where}: the chat template failed: {' '.join(str(error).split())}") from error
        return str(text)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja."""
        self._fast.save_pretrained(folder)
        # transformers 5 writes the name that the class has there; earlier versions read the older name alone. It also
        # notes how the tokenizer was read, which a copy of a copy would not have alike.
        config = {key: value for key, value in read_json_object(folder / _CONFIG).items() if key not in _READING}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def character_tokenizer(alphabet: str, vocab_size: int, eos: str) -> Tokenizer:
    """One token a character: `<pad>` 0, `eos` 1, `<unk>` 2, then the alphabet in order, then `<unused0>`..."""
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", eos, "<unk>", *(character for character in alphabet if character != eos)]
    assert len(set(names)) == len(names), f"repeated in alphabet {alphabet!r} or special tokens"
    assert len(names) <= vocab_size, f"{len(names)} tokens do not fit in vocab_size={vocab_size}"
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    # `<unk>` stays an ordinary token: one that a model samples must show in the text, not vanish from it.
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken(eos, special=True)])
    special = {"eos_token": eos, "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    return Tokenizer(fast, frozenset(), "character tokenizer")


def _configured_eos(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = read_json_object(path).get("eos_token_id") if path.is_file() else None
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise UserError(f"{path}: eos_token_id: found {json.dumps(eos)}, expected a token id or a list of them")
        return frozenset(ids)
    return frozenset()


def _sampling_defaults(path: Path) -> dict[str, Any]:
    content = read_json_object(path) if path.is_file() else {}
    return {key: value for key, value in content.items() if key not in ("bos_token_id", "eos_token_id", "pad_token_id")}
