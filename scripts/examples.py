"""Regenerates the checked-in examples through the command line, or compares them with what memc writes now.

An example is a folder `examples/<name>/` with a `spec.yaml` and, when memc finds a plan, the generated folder `out/`;
when it finds none, `refusal.txt` holds what memc printed. Everything is generated in a copy of `examples/`, from which
commands and paths look as they do in the repository; only then are files compared or replaced.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
OUTPUT_FOLDER = "out"
REFUSAL_FILE = "refusal.txt"
DOES_NOT_FIT = 3


def example_names() -> list[str]:
    """Returns the names of the folders that hold a spec, sorted."""
    return sorted(spec.parent.name for spec in EXAMPLES.glob("*/spec.yaml"))


def is_generated(path: Path) -> bool:
    """Whether `path`, relative to an example's folder, is written by memc and not by a person."""
    return path.parts[0] == OUTPUT_FOLDER or path == Path(REFUSAL_FILE)


def generated_files(example: Path) -> dict[Path, bytes]:
    """Returns path (relative to `example`) → content of every generated file of one example."""
    files = (path for path in sorted(example.rglob("*")) if path.is_file())
    return {path.relative_to(example): path.read_bytes() for path in files if is_generated(path.relative_to(example))}


def regenerate(name: str, workspace: Path) -> None:
    """Compiles one example inside `workspace`, a folder that holds a copy of the inputs under `examples/`.

    Nothing is traced, so that what is checked in does not depend on whether torch is installed.

    Raises:
        RuntimeError: When memc neither wrote a folder (exit 0) nor refused the spec (exit 3).
    """
    folder = f"examples/{name}"
    memc = Path(sys.executable).with_name("memc")
    command = [str(memc), "compile", f"{folder}/spec.yaml", "-o", f"{folder}/{OUTPUT_FOLDER}", "--no-certify"]
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "120", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == DOES_NOT_FIT:
        lines = (line.rstrip() for line in (done.stdout + done.stderr).splitlines())  # tables pad to their width
        (workspace / folder / REFUSAL_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif done.returncode != 0:
        shown = "memc " + " ".join(command[1:])
        raise RuntimeError(f"{shown} exited {done.returncode}:\n{done.stdout}{done.stderr}")


def differences(name: str, before: dict[Path, bytes], after: dict[Path, bytes]) -> Iterator[str]:
    """Yields what is missing, left over or different, file by file, with unified diffs of the last."""
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        shown = f"examples/{name}/{path.as_posix()}"
        if old is None:
            yield f"{shown}: generated, but not checked in"
        elif new is None:
            yield f"{shown}: checked in, but no longer generated"
        elif old != new:
            yield from difflib.unified_diff(
                old.decode(errors="replace").splitlines(),
                new.decode(errors="replace").splitlines(),
                fromfile=f"{shown} (checked in)",
                tofile=f"{shown} (generated)",
                lineterm="",
            )


def replace(example: Path, before: dict[Path, bytes], after: dict[Path, bytes]) -> None:
    """Makes the generated files of the checked-in `example` those of `after`."""
    for path in before.keys() - after.keys():
        (example / path).unlink()
    for path, content in after.items():
        (example / path).parent.mkdir(parents=True, exist_ok=True)
        (example / path).write_bytes(content)


def copy_inputs(workspace: Path) -> None:
    """Copies what people wrote under `examples/` to `workspace`, without anything generated."""

    def generated(folder: str, entries: list[str]) -> set[str]:
        inside = Path(folder).relative_to(EXAMPLES)
        return {entry for entry in entries if len(inside.parts) == 1 and is_generated(Path(entry))}

    shutil.copytree(EXAMPLES, workspace / "examples", ignore=generated)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when `--check` found a difference or an example did not compile, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare and fail on a difference; write nothing")
    check = parser.parse_args(arguments).check
    names = example_names()
    if not names:
        print("no example found: expected examples/<name>/spec.yaml", file=sys.stderr)
        return 1
    changed = 0
    with tempfile.TemporaryDirectory(prefix="memc-examples-") as scratch:
        workspace = Path(scratch)
        copy_inputs(workspace)
        for name in names:
            regenerate(name, workspace)
            before, after = generated_files(EXAMPLES / name), generated_files(workspace / "examples" / name)
            changed += before != after
            if check:
                for line in differences(name, before, after):
                    print(line)
            else:
                replace(EXAMPLES / name, before, after)
    what = "differ from what memc writes; run `make examples` and review the change" if check else "rewritten"
    print(f"{len(names)} examples, {changed} {what if changed else 'changed'}", file=sys.stderr)
    return 1 if check and changed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(str(error))
