"""Launcher lines and Slurm directives of shell scripts, read as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memc.lint.records import Document, Kind, leaf, section
from memc.lint.records import words as words_of
from memc.lint.scripts import UNRESOLVED
from memc.spec_source import Node, Position, scalar_value

_ASSIGNED = re.compile(
    r"\s*(?:export\s+|local\s+|readonly\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>[^\s;&|]*)\s*(?:$|[;#])"
)
_DIRECTIVE = re.compile(r"#SBATCH\s+(?P<flag>--?[A-Za-z][\w-]*)(?:[=\s]\s*(?P<value>[^\s#]+))?")
_TOKEN = re.compile(
    r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'\\;&|()<>#]|(?<=\S)\#)+|[;&|()<>]+|\#.*$""", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus", "-c": "cpus_per_task"}
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_SWITCHES = words_of(
    "multi_gpu use_deepspeed use_fsdp cpu tpu same_network debug quiet standalone module no_python no_ssh "
    "enable_cpu_affinity use_parallelism_config use_megatron_lm mps"
)
"""Flags of launchers that take no value."""
_MAX_TOKENS = 4000
_FILES = (".json", ".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class _Token:
    text: str
    position: Position


def shell_documents(path: Path, text: str) -> tuple[Document, ...]:
    """Returns a document per launcher line, the arguments that it passes on, and the Slurm directives."""
    found: list[Document] = []
    directives = _directives(text)
    if directives.keys:
        found.append(Document(kind=Kind.SLURM, path=path, node=directives))
    variables: dict[str, str] = {}
    for line in _logical_lines(text):
        assigned = _ASSIGNED.fullmatch(line[0].text) if len(line) == 1 else None
        if assigned is not None:
            variables[assigned["name"]] = _expanded(_unquoted(assigned["value"]), variables)
        exported = [_ASSIGNED.fullmatch(token.text) for token in line[1:]] if line[0].text == "export" else []
        variables |= {m["name"]: _expanded(_unquoted(m["value"]), variables) for m in exported if m is not None}
        found += _launches(path, line, variables)
    return tuple(found)


def _logical_lines(text: str) -> Iterator[list[_Token]]:
    """Yields the words of each command with their places; a backslash at the end of a line joins it to the next."""
    line: list[_Token] = []
    lines = text.split("\n")
    for number, raw in enumerate(lines, start=1):
        stripped = raw.rstrip()
        joined = stripped.endswith("\\")
        body = stripped[:-1] if joined else stripped
        for match in _TOKEN.finditer(body):
            if match.group().startswith("#"):
                break
            token = _Token(text=match.group(), position=Position(line=number, column=match.start() + 1))
            if token.text[0] in ";&|()":
                if line:
                    yield line
                line = []
            elif len(line) < _MAX_TOKENS:
                line.append(token)
        if not joined and line:
            yield line
            line = []
    if line:
        yield line


def _directives(text: str) -> Node:
    keys: dict[str, tuple[Position, Node]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        position = Position(line=number, column=1)
        name = _SHORT.get(match["flag"]) or match["flag"].lstrip("-").replace("-", "_")
        keys[name] = (position, leaf(scalar_value(match["value"] or ""), position))
    return section(keys, Position(line=1, column=1))


def _launches(path: Path, line: list[_Token], variables: dict[str, str]) -> Iterator[Document]:
    """Yields the documents of one command: the launcher's own flags, then what it passes to the script."""
    words = [_expanded(_unquoted(token.text), variables) for token in line]
    start = next((index for index, word in enumerate(words) if _launcher(words, index)), None)
    if start is None:
        return
    launcher = _launcher(words, start)
    begin = start + {"accelerate": 2, "python": 3}.get(_step(words, start), 1)
    flags, after = _flags(line, words, begin, launcher)
    script = words[after] if after < len(words) else ""
    position = line[start].position
    named = ("config_file", "deepspeed_config_file")
    names = [node.value for name, (_, node) in flags.items() if name in named and isinstance(node.value, str)]
    before = [_ASSIGNED.fullmatch(word) for word in words[:start]]
    known = variables | {match["name"]: match["value"] for match in before if match is not None}
    environment = {name: value for name, value in known.items() if name.isupper()}
    launch = Document(
        kind=Kind.LAUNCH,
        path=path,
        node=section(flags, position),
        dialect=launcher,
        names=tuple(names),
        extra={
            "script": script,
            "environment": environment,
            "srun": "srun" in words[:start],
            "open": any("$" in word for word in words[start:after]),
        },
    )
    yield launch
    passed, _ = _flags(line, words, after + 1, "")
    if passed:
        listed = tuple(word for word in words[after + 1 :] if word.endswith(_FILES))
        yield Document(
            kind=Kind.ARGUMENTS,
            path=path,
            node=section(passed, position),
            dialect="command",
            names=listed,
            owner=launch,
        )
    elif after + 1 < len(words):
        configs = tuple(word for word in words[after + 1 :] if word.endswith(_FILES))
        if configs:
            yield Document(
                kind=Kind.ARGUMENTS,
                path=path,
                node=section({}, position),
                dialect="command",
                names=configs,
                owner=launch,
            )


def _step(words: list[str], index: int) -> str:
    name = words[index].rpartition("/")[2]
    return "python" if name.startswith("python") else name


def _launcher(words: list[str], index: int) -> str:
    """Returns which launcher a word begins; empty when none."""
    name, rest = words[index].rpartition("/")[2], words[index + 1 : index + 3]
    if name == "accelerate":
        return "accelerate" if rest[:1] == ["launch"] else ""
    if name in ("accelerate-launch",):
        return "accelerate"
    if name in ("torchrun", "deepspeed"):
        return name
    if name.startswith("python") and len(rest) == 2 and rest[0] == "-m":
        if rest[1] in _TORCH_MODULES:
            return "torchrun"
        return "accelerate" if rest[1] == "accelerate.commands.launch" else ""
    return ""


def _flags(
    line: list[_Token], words: list[str], begin: int, launcher: str
) -> tuple[dict[str, tuple[Position, Node]], int]:
    """Returns long flags with their values from a word on, and where they end.

    A launcher's flags end at the script; those of a script, at the end of the line.
    """
    flags: dict[str, tuple[Position, Node]] = {}
    index = begin
    while index < len(words):
        word, position = words[index], line[index].position
        if not word.startswith("-") or word == "-":
            if launcher:
                return flags, index
            index += 1
            continue
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").replace("-", "_")
        index += 1
        following = words[index] if index < len(words) else ""
        if launcher and plain in ("m", "module") and not equals:
            return flags, index
        if not equals and following and not _is_flag(following) and not (launcher and plain in _SWITCHES):
            value, index = following, index + 1
            equals = "="
        if plain:
            flags[plain] = (position, leaf(_meant(value) if equals else True, position))
    return flags, index


def _meant(value: str) -> object:
    """Returns what a flag's value means; of a path below an unknown folder its name, else that only a run can tell."""
    if "$" not in value:
        return scalar_value(value)
    name = value.rpartition("/")[2]
    return name if name.endswith(_FILES) and "$" not in name else UNRESOLVED


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d[\d.eE+-]*", word)


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return re.sub(r"\"((?:\\.|[^\"\\])*)\"|'([^']*)'", lambda match: match[1] or match[2] or "", text)


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Returns text with variables whose value is known put in; others stay."""

    def known(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match.group())

    return _VARIABLE.sub(known, text)[:4096]
