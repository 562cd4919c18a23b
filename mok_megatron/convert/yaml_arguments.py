"""Conversion of YAML files that hold Megatron arguments: mappings, lists of words, strings, and embedded scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml

from mok_megatron.convert import rules
from mok_megatron.convert.edits import Edit, NotUnderstoodError, line_of
from mok_megatron.convert.shell import convert_shell_part, inside, text_words
from mok_megatron.convert.words import Converter, FlagUse, Word, replacement

_MENTION = re.compile(
    r"(?<![\w$-])(?:--)?(?:"
    + "|".join(name[2:].replace("-", "[-_]") for name in sorted([rules.TYPE_FLAG, *rules.DROPPED_FLAGS], key=len)[::-1])
    + r")(?![\w-])"
)
_ARGUMENT_KEYS = re.compile(r".*(?:args|arguments|flags|options|opts|cmd|command|script|run|launch)", re.IGNORECASE)
_PROSE_KEYS = re.compile(r"(?:.*[_-])?(?:desc|description|notes?|comment|name|title|help|summary|doc)", re.IGNORECASE)

Span = tuple[int, int]


def convert_yaml(text: str) -> Converter:
    """Convert a file. Raises NotUnderstoodError for YAML that cannot be parsed or a form that is not understood."""
    walker = _Walker(Converter(text=text))
    try:
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        walker.comments = _comments(text)
    except yaml.YAMLError as error:
        raise NotUnderstoodError(f"not valid YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if document is not None:
            walker.walk(document)
    walker.add_missing_type()
    walker.check_mentions()
    return walker.converter


def _comments(text: str) -> list[Span]:
    """Spans of the comments: what starts with # outside every scalar."""
    scalars = [
        (token.start_mark.index, token.end_mark.index)
        for token in yaml.scan(text, Loader=yaml.SafeLoader)
        if isinstance(token, yaml.ScalarToken)
    ]
    matches = re.finditer(r"(?:^|(?<=\s))#[^\n]*", text, re.MULTILINE)
    return [match.span() for match in matches if not inside(match.start(), scalars)]


@dataclass
class _Walker:
    converter: Converter
    comments: list[Span] = field(default_factory=list)
    quiet: list[Span] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    experts: list[tuple[yaml.MappingNode, yaml.Node, yaml.Node]] = field(default_factory=list)

    def walk(self, node: yaml.Node, key: yaml.Node | None = None) -> None:
        """Convert what is below ``node``, the value of ``key``; an anchored node is converted once."""
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self.walk_mapping(node, key)
        elif isinstance(node, yaml.SequenceNode):
            self.walk_sequence(node)
        elif isinstance(node, yaml.ScalarNode):
            self.walk_scalar(node, str(key.value) if isinstance(key, yaml.ScalarNode) else "")

    def walk_mapping(self, node: yaml.MappingNode, key_of_node: yaml.Node | None) -> None:
        dropped = []
        for index, (key, value) in enumerate(node.value):
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
            flag = rules.flag_name(name)
            self.record(flag, key, value)
            if flag == rules.TYPE_FLAG:
                self.replace_type(key, value)
            elif flag in rules.DROPPED_FLAGS or name in rules.DROPPED_ENVIRONMENT:
                known = flag in rules.DROPPED_FLAGS
                why = rules.why_dropped(flag) if known else rules.DROPPED_ENVIRONMENT[name]
                self.note_dropped(key, value, why)
                dropped.append(index)
            elif flag in rules.KEPT_FLAGS or name in rules.KEPT_ENVIRONMENT:
                why = rules.KEPT_FLAGS.get(flag) or rules.KEPT_ENVIRONMENT[name]
                self.converter.note("kept", key.start_mark.index, name, why)
            elif flag == rules.EXPERTS_FLAG:
                self.experts.append((node, key, value))
            else:
                self.walk(value, key)
        spans = [(key.start_mark.index, value.end_mark.index) for key, value in node.value]
        self.drop(spans, dropped, flow=bool(node.flow_style))
        if dropped and len(dropped) == len(spans) and not node.flow_style and key_of_node is not None:
            colon = self.converter.text.index(":", key_of_node.end_mark.index) + 1
            self.converter.edits.append(Edit(start=colon, end=colon, new=" {}"))

    def record(self, flag: str, key: yaml.Node, value: yaml.Node) -> None:
        """Remember a flag for the refusals; a false one is not set."""
        line = line_of(self.converter.text, key.start_mark.index)
        if isinstance(value, yaml.SequenceNode):
            values = tuple(shlex.quote(str(item.value)) for item in value.value)
        elif value.tag == "tag:yaml.org,2002:bool" and value.value.lower() in ("false", "no", "off"):
            return
        else:
            values = () if value.tag == "tag:yaml.org,2002:bool" else (shlex.quote(str(value.value)),)
        self.converter.flags.append(FlagUse(name=flag, values=values, line=line))

    def replace_type(self, key: yaml.Node, value: yaml.Node) -> None:
        text = self.converter.text
        self.converter.accounted.append((key.start_mark.index, key.end_mark.index))
        alias = re.compile(r"[\"']?\s*:\s*(\*[^\s,\]}]+)").match(text, key.end_mark.index)
        if alias is not None and id(value) in self.seen:
            return
        self.seen.add(id(value))
        if alias is not None:
            self.converter.replace_type(Edit(start=alias.start(1), end=alias.end(1), new=rules.NEW_TYPE))
            return
        if not isinstance(value, yaml.ScalarNode) or value.value not in (*rules.OLD_TYPES, rules.NEW_TYPE):
            raise self.converter.error(
                key.start_mark.index,
                f"{rules.TYPE_FLAG} is {value.value!r}, expected one of {', '.join(rules.OLD_TYPES)}: write it out",
            )
        start, end = value.start_mark.index, value.end_mark.index
        self.converter.replace_type(replacement(Word(start=start, end=end, raw=text[start:end]), value.value))

    def note_dropped(self, key: yaml.Node, value: yaml.Node, why: str) -> None:
        if not isinstance(value, yaml.ScalarNode) or value.style in ("|", ">"):
            raise self.converter.error(key.start_mark.index, f"{key.value} needs one plain value")
        self.converter.accounted.append((key.start_mark.index, key.end_mark.index))
        self.converter.note("dropped", key.start_mark.index, f"{key.value}: {value.value}", why)

    def walk_sequence(self, node: yaml.SequenceNode) -> None:
        """A list of words, as for a process; or a list of anything else."""
        text = self.converter.text
        items = [(item.start_mark.index, item.end_mark.index) for item in node.value]
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            words = [Word(start=start, end=end, raw=text[start:end]) for start, end in items]
            runs = self.converter.scan(words)
            dropped = [index for first, last in runs for index in range(first, last + 1)]
            self.drop(items, dropped, flow=bool(node.flow_style), are_items=True)
        for item in node.value:
            if isinstance(item, yaml.ScalarNode) and not re.search(r"\s", item.value):
                continue
            self.walk(item)

    def walk_scalar(self, node: yaml.ScalarNode, name: str) -> None:
        """A string: a script, arguments, or prose."""
        start, end = node.start_mark.index, node.end_mark.index
        text = self.converter.text
        if node.style == "|":
            if _MENTION.search(text, start, end) or rules.EXPERTS_FLAG in node.value:
                convert_shell_part(self.converter, text.index("\n", start) + 1, end)
                self.quiet.append((start, end))
            return
        if _PROSE_KEYS.fullmatch(name):
            self.quiet.append((start, end))
        elif re.match(r"(?:\$\{?\w+\}?\s+)*--\w", node.value) or _ARGUMENT_KEYS.fullmatch(name):
            quote = 1 if node.style in ("'", '"') else 0
            self.converter.convert_words(text_words(text, start + quote, end - quote), start + quote)

    def drop(self, spans: Sequence[Span], dropped: Sequence[int], *, flow: bool, are_items: bool = False) -> None:
        """Drop pairs or items: whole lines of a block collection, or with their comma from a flow collection."""
        kept = [index for index in range(len(spans)) if index not in set(dropped)]
        edits = self.converter.edits
        if not flow:
            edits += [self.line_edit(*spans[index], is_item=are_items) for index in dropped]
        elif not kept and dropped:
            edits.append(Edit(start=spans[0][0], end=spans[-1][1]))
        elif dropped:
            edits += [Edit(start=spans[i][0], end=spans[i + 1][0]) for i in dropped if i < kept[-1]]
            if kept[-1] < dropped[-1]:
                edits.append(Edit(start=spans[kept[-1]][1], end=spans[-1][1]))

    def line_edit(self, start: int, end: int, *, is_item: bool) -> Edit:
        """Delete the lines of a pair or item, but keep a comment behind it."""
        text = self.converter.text
        line_start, line_end = text.rfind("\n", 0, start) + 1, text.find("\n", end)
        line_end = len(text) if line_end < 0 else line_end
        before = text[line_start:start]
        if not re.fullmatch(r"[ \t]*-[ \t]+" if is_item else r"[ \t]*", before):
            raise self.converter.error(start, "cannot drop this without moving its neighbours: change it by hand")
        comment = re.compile(r"[ \t]*(?=#)").match(text, end, line_end)
        if comment is not None:
            return Edit(start=line_start + len(before) - len(before.lstrip()), end=comment.end())
        return Edit(start=line_start, end=min(line_end + 1, len(text)))

    def add_missing_type(self) -> None:
        """Where experts are configured but no dispatcher is named, name mok, spelled like the experts' key."""
        if not self.experts:
            self.converter.add_missing_type()
        if any(flag.name == rules.TYPE_FLAG for flag in self.converter.flags):
            return
        for node, key, value in self.experts:
            dashes = "--" if str(key.value).startswith("--") else ""
            separator = "_" if "_" in str(key.value) else "-"
            pair = f"{dashes}{rules.TYPE_FLAG[2:].replace('-', separator)}: {rules.NEW_TYPE}"
            end = value.end_mark.index
            if node.flow_style:
                edit = Edit(start=end, end=end, new=f", {pair}")
            else:
                line_end = self.converter.text.find("\n", end)
                line_end = len(self.converter.text) if line_end < 0 else line_end
                edit = Edit(start=line_end, end=line_end, new=f"\n{' ' * key.start_mark.column}{pair}")
            self.converter.edits.append(edit)
            self.converter.note("added", key.start_mark.index, pair, "no dispatcher was named here")

    def check_mentions(self) -> None:
        """Every mention of a flag that matters must be converted, a comment or prose."""
        converter = self.converter
        for match in _MENTION.finditer(converter.text):
            if inside(match.start(), converter.accounted):
                continue
            if not inside(match.start(), [*self.comments, *self.quiet]):
                raise converter.error(
                    match.start(), f"{match[0]} appears in a form that this tool does not understand: change it by hand"
                )
            if inside(match.start(), self.comments):
                converter.note("left", match.start(), match[0], "only mentioned here, not passed to Megatron")
