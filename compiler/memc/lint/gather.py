"""Finding and reading the files of a folder, and which of them belong to one run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memc.lint import recognise, scripts
from memc.lint.reading import UnreadableError, parse, text_of
from memc.lint.records import Document, Kind, Place, Remark, Weight
from memc.lint.requirements import project_requirements, requirements_in
from memc.lint.shell import shell_documents

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist", "build"})
_SHELL = (".sh", ".bash", ".sbatch", ".slurm", ".zsh", ".job")
_LAUNCHES = (b"accelerate", b"torchrun", b"deepspeed", b"torch.distributed")
MAX_FILES = 20_000
_TELLING_NAMES = ("ds_", "deepspeed", "zero", "accelerate", "fsdp", "adapter_config", "peft")
_BEGINNING = (Kind.LAUNCH, Kind.ARGUMENTS, Kind.SCRIPT, Kind.ACCELERATE)
_KINDS_OF_ONE_RUN = (
    Kind.ACCELERATE,
    Kind.DEEPSPEED,
    Kind.FSDP,
    Kind.ARGUMENTS,
    Kind.ADAPTER,
    Kind.QUANTIZATION,
    Kind.MODEL,
    Kind.SCRIPT,
    Kind.SLURM,
    Kind.LAUNCH,
)


@dataclass(frozen=True, kw_only=True)
class Read:
    """What files hold.

    Attributes:
        documents: In the order of the files.
        remarks: What is wrong with the texts themselves.
    """

    documents: tuple[Document, ...]
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The documents that one run reads, what decides first in front."""

    documents: tuple[Document, ...]


def files_below(path: Path, passed_over: Iterable[Path] = ()) -> Iterator[Path]:
    """Yields a file, or the files below a folder in a stable order.

    Hidden folders, folders of installed packages and those passed over are left out; links to folders are not followed.
    """
    if not path.is_dir():
        yield path
        return
    skipped = frozenset(os.path.realpath(folder) for folder in passed_over)
    count = 0
    for folder, inner, files in os.walk(path):
        inner[:] = sorted(
            name
            for name in inner
            if not name.startswith(".")
            and name not in _SKIPPED
            and (not skipped or os.path.realpath(Path(folder, name)) not in skipped)
        )
        if skipped and os.path.realpath(folder) in skipped:
            continue
        for name in sorted(files):
            count += 1
            if count > MAX_FILES:
                return
            yield Path(folder, name)


def read_files(paths: Iterable[Path]) -> Read:
    """Returns the documents of files that are recognised by what they hold; all others are passed over."""
    documents: list[Document] = []
    remarks: list[Remark] = []
    for path in paths:
        try:
            found, said = _read(path)
        except RecursionError:
            continue
        documents += found
        remarks += said
    return Read(documents=tuple(documents), remarks=tuple(remarks))


def _read(path: Path) -> tuple[Sequence[Document], list[Remark]]:
    suffix, name = path.suffix.lower(), path.name.lower()
    if suffix in (".json", ".yaml", ".yml"):
        return _structured(path)
    if suffix == ".py":
        text = _text_with(path, scripts.WORDS)
        return (scripts.script_documents(path, text) if text is not None else ()), []
    if suffix == ".txt" and ("require" in name or "constraint" in name or name == "environment.txt"):
        text = text_of(path)
        found = requirements_in(path, text) if text is not None else None
        return ((found,) if found is not None else ()), []
    if name == "pyproject.toml":
        text = text_of(path)
        found = project_requirements(path, text) if text is not None else None
        return ((found,) if found is not None else ()), []
    if suffix in _SHELL or (not suffix and _is_shell(path)):
        text = _text_with(path, (*_LAUNCHES, b"#SBATCH"))
        return (shell_documents(path, text) if text is not None else ()), []
    return (), []


def _text_with(path: Path, words: Iterable[bytes]) -> str | None:
    text = text_of(path)
    return text if text is not None and any(word.decode() in text for word in words) else None


def _is_shell(path: Path) -> bool:
    """Whether a file without a suffix begins as a shell script does."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            first = stream.readline(64)
    except OSError:
        return False
    return first.startswith(b"#!") and b"sh" in first


def _structured(path: Path) -> tuple[Sequence[Document], list[Remark]]:
    text = _text_with(path, recognise.WORDS)
    if text is None:
        return (), []
    strict = path.suffix.lower() == ".json"
    try:
        parsed = parse(text, strict_json=strict)
    except UnreadableError as error:
        telling = any(word in path.name.lower() for word in _TELLING_NAMES)
        place = Place(path=path, line=error.position.line, column=error.position.column)
        what = "JSON" if strict else "YAML"
        message = f"{path.name} is not {what}: {error}"
        remark = Remark(
            code="lint-syntax",
            weight=Weight.ERROR if telling else Weight.WARNING,
            message=message,
            hint="correct it at this place: whoever reads the file stops here",
            place=place,
        )
        return (), [remark]
    documents = recognise.recognised(path, parsed.root)
    if not documents:
        return (), []
    remarks = [
        Remark(
            code="lint-repeated-key",
            weight=Weight.ERROR if documents[0].kind is Kind.DEEPSPEED else Weight.WARNING,
            message=f"{key} stands twice in the same section of {path.name}: "
            + ("DeepSpeed refuses such a file" if documents[0].kind is Kind.DEEPSPEED else "the last one counts"),
            hint="remove one of the two",
            place=Place(path=path, line=second.line, column=second.column),
            others=(Place(path=path, line=first.line, column=first.column),),
        )
        for key, second, first in parsed.repeated
    ]
    return documents, remarks


def runs_in(documents: Sequence[Document], root: Path) -> tuple[Run, ...]:
    """Returns the runs that documents belong to.

    A launcher line, else arguments, else whatever stands alone begins a run. It takes the files that are named on the
    way, and of each kind that nobody named the only one in its folder, or else the only one of all.
    """
    runs, taken = [], [False] * len(documents)
    positions = {id(document): index for index, document in enumerate(documents)}
    for kinds in (
        (Kind.LAUNCH,),
        (Kind.ARGUMENTS,),
        (Kind.SCRIPT,),
        (Kind.ACCELERATE,),
        (Kind.DEEPSPEED, Kind.FSDP),
        (Kind.ADAPTER, Kind.QUANTIZATION, Kind.SLURM),
    ):
        for document in documents:
            if document.kind not in kinds or document.owner is not None or taken[positions[id(document)]]:
                continue
            members = _members(document, documents, root)
            for member in members:
                taken[positions[id(member)]] = True
            runs.append(Run(documents=members))
    return tuple(runs)


def _members(first: Document, documents: Sequence[Document], root: Path) -> tuple[Document, ...]:
    found: list[Document] = []
    queue = [first]
    while queue:
        document = queue.pop(0)
        if any(document is member for member in found):
            continue
        found.append(document)
        queue += [other for other in documents if other.owner is document]
        if document.owner is not None:
            queue.append(document.owner)
        script = document.extra.get("script")
        names = (*document.names, *((script,) if isinstance(script, str) and script else ()))
        queue += [other for name in names for other in _named(name, document, documents, root)]
        if document.path.suffix == ".py":
            queue += [other for other in documents if other.path == document.path]
    for kind in _KINDS_OF_ONE_RUN:
        if not any(member.kind is kind for member in found):
            found += _only(kind, first, documents, found)
    found += _requirements(first, documents)
    return tuple(sorted(found, key=_rank))


def _rank(document: Document) -> int:
    """Returns the place of a document among those of a run: what is said on a command line goes before files."""
    if document.dialect == "command":
        return 0
    return 1 if document.kind is Kind.LAUNCH else 2


def _named(name: str, by: Document, documents: Sequence[Document], root: Path) -> list[Document]:
    """Returns the documents of the file that a document names, from its own folder, the root, or by its end."""
    bare = name.removeprefix("./")
    for candidate in (by.path.parent / bare, root / bare):
        here = [document for document in documents if os.path.normpath(document.path) == os.path.normpath(candidate)]
        if here:
            return here
    end = Path(bare).name
    files = {document.path for document in documents if document.path.name == end}
    return [document for document in documents if document.path in files] if len(files) == 1 else []


def _only(
    kind: Kind, first: Document, documents: Sequence[Document], found: Sequence[Document]
) -> tuple[Document, ...]:
    """Returns the only document of a kind beside the first one, or of all; with those inside of it.

    A file that lies with the files of another run is that run's, and a run that is told to use one engine takes no file
    of another.
    """
    if kind is Kind.LAUNCH or (kind is Kind.ARGUMENTS and any(member.dialect == "command" for member in found)):
        return ()
    if kind in (Kind.DEEPSPEED, Kind.FSDP) and _elsewhere(kind, found):
        return ()
    candidates = [document for document in documents if document.kind is kind and document.owner is None]
    beside = [document for document in candidates if document.path.parent == first.path.parent]
    alone = [] if beside else [document for document in candidates if not _in_company(document, documents, found)]
    group = beside or alone
    if len({document.path for document in group}) != 1:
        return ()
    return tuple(d for d in documents if any(d is item or d.owner is item for item in group))


def _in_company(document: Document, documents: Sequence[Document], found: Sequence[Document]) -> bool:
    """Whether a document lies beside one that begins a run other than this one."""
    here = [other for other in documents if other.path.parent == document.path.parent and other.kind in _BEGINNING]
    return any(not any(other is member for member in found) for other in here if other is not document)


def _elsewhere(kind: Kind, found: Sequence[Document]) -> bool:
    """Whether the run is told to take another engine, or another file, than the only one of this kind."""
    engines = {str(member.value("distributed_type")).upper() for member in found if member.kind is Kind.ACCELERATE}
    wanted = "DEEPSPEED" if kind is Kind.DEEPSPEED else "FSDP"
    return bool(engines) and wanted not in engines


def _requirements(first: Document, documents: Sequence[Document]) -> tuple[Document, ...]:
    """Returns the requirements that stand beside the first document or nearest above it, else the only ones of all."""
    every = [document for document in documents if document.kind is Kind.REQUIREMENTS]
    above = [document for document in every if document.path.parent in (first.path.parent, *first.path.parent.parents)]
    if above:
        depth = max(len(document.path.parts) for document in above)
        return tuple(document for document in above if len(document.path.parts) == depth)
    return tuple(every) if len(every) == 1 else ()
