"""Cold start: how long one `memc compile` takes beside importing the libraries that it cannot do without.

Both are whole processes, run alternately so that a slow moment of the machine hits both; medians are compared. The
last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTS = "import pydantic, jinja2, click, yaml"


def wall_seconds(command: list[str]) -> float:
    """Returns the wall-clock seconds of one run of `command` as a process of its own.

    Raises:
        RuntimeError: When it exits with anything but 0.
    """
    start = time.perf_counter()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["NO_COLOR"] = "1"  # and byte code is kept, as an installed package has it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def measure(spec: Path, runs: int) -> dict[str, float | int | str]:
    """Returns medians over `runs` alternating runs, in seconds, with their ratio and difference.

    One run of each goes before and is not counted: it fills the page cache and writes byte code.
    """
    memc = str(Path(sys.executable).with_name("memc"))
    compile_seconds: list[float] = []
    import_seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="memc-bench-") as scratch:
        for run in range(runs + 1):
            imported = wall_seconds([sys.executable, "-c", IMPORTS])
            compiled = wall_seconds([memc, "compile", str(spec), "-o", f"{scratch}/{run}", "--no-certify"])
            if run:
                import_seconds.append(imported)
                compile_seconds.append(compiled)
    compiled, imported = statistics.median(compile_seconds), statistics.median(import_seconds)
    return {
        "schema": "memc/bench-startup/1",
        "spec": spec.as_posix(),
        "runs": runs,
        "compile_seconds": round(compiled, 4),
        "compile_fastest_seconds": round(min(compile_seconds), 4),
        "import_seconds": round(imported, 4),
        "difference_seconds": round(compiled - imported, 4),
        "ratio": round(compiled / imported, 3),
    }


def main() -> None:
    """Prints the medians for people, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("spec", type=Path, help="the spec to compile")
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each (default: 9)")
    options = parser.parse_args()
    result = measure(options.spec, options.runs)
    print(f"memc compile {result['spec']}: {result['compile_seconds']} s (median of {result['runs']})")
    print(f'python -c "{IMPORTS}": {result["import_seconds"]} s')
    print(f"difference {result['difference_seconds']} s, ratio {result['ratio']}")
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
